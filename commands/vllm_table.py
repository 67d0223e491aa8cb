"""The summary that `vllm bench serve` prints, from the document that it would have written: the same figures on the
screen as in the file."""

from collections.abc import Mapping, Sequence
from typing import Any

from sojourn.interop.exported.vllm_result import SUMMARISED
from sojourn.metrics.request.latencies import QUANTILE_MIN_SAMPLES

TITLES = {
    "ttft": ("Time to First Token", "TTFT"), "tpot": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl": ("Inter-token Latency", "ITL"), "e2el": ("End-to-end Latency", "E2EL"),
}  # fmt: skip
TOTALS = {
    "Successful requests": ("completed", "{:,}"), "Failed requests": ("failed", "{:,}"),
    "Benchmark duration (s)": ("duration", "{:,.2f}"), "Total input tokens": ("total_input_tokens", "{:,}"),
    "Total generated tokens": ("total_output_tokens", "{:,}"),
    "Request throughput (req/s)": ("request_throughput", "{:,.2f}"),
    "Request goodput (req/s)": ("request_goodput", "{:,.2f}"),
    "Output token throughput (tok/s)": ("output_throughput", "{:,.2f}"),
    "Total token throughput (tok/s)": ("total_token_throughput", "{:,.2f}"),
}  # fmt: skip


def vllm_table(
    document: Mapping[str, Any], metrics: Sequence[str] = SUMMARISED, percentiles: Sequence[float] = (99.0,)
) -> list[tuple[str, str, str]]:
    """Rows of name, value and note, a row with the name alone being a heading. What is not known is left out.

    vLLM gives a percentile from any number of samples: the note says where these are too few for the claim.
    """
    rows = [
        (name, style.format(document[key]), "")
        for name, (key, style) in TOTALS.items() if document.get(key) is not None
    ]  # fmt: skip
    for metric in (name for name in metrics if name in TITLES):
        title, short = TITLES[metric]
        figures = [("Mean", "mean"), ("Median", "median"), *((f"P{each:g}", f"p{each:g}") for each in percentiles)]
        known = [(word, key, document.get(f"{key}_{metric}_ms")) for word, key in figures]
        if any(value is not None for _, _, value in known):
            rows.append((title, "", ""))
            rows += [
                (f"{word} {short} (ms)", f"{value:,.2f}", _note(key, document))
                for word, key, value in known if value is not None
            ]  # fmt: skip
    return rows


def _note(key: str, document: Mapping[str, Any]) -> str:
    needed = QUANTILE_MIN_SAMPLES.get(key, 0)
    return f"of few requests: {needed} are needed" if document.get("completed", 0) < needed else ""
