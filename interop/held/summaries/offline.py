"""Results of `vllm bench latency` and `vllm bench throughput`: JSON, and what they print.

Neither has a server: one process computes a batch that it has whole. A latency is that of a whole batch, from its
submission to its last token, and no client waits in a line.
"""

import re
from typing import Any

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Held, Reader
from sojourn.interop.held.literals import found_in
from sojourn.interop.held.summaries.figures import figures_of, prove, statistic_of
from sojourn.interop.imported.result import inner, number
from sojourn.metrics.errors import InputError

LATENCY, THROUGHPUT = "vllm bench latency", "vllm bench throughput"
CLOCKS = {
    "e2e_ms": "offline: a whole batch, from its submission to its last token",
    "requests_per_s": "offline: all requests at once, over the whole time",
    "total_tokens_per_s": "offline: prompt and output tokens, over the whole time",
    "output_tokens_per_s": "offline: output tokens, over the whole time",
}  # fmt: skip
MISSING = ["a server under load: TTFT, TPOT and waits take `vllm bench serve`"]
RATES = {"requests/s": "requests_per_s", "total tokens/s": "total_tokens_per_s", "output tokens/s":
         "output_tokens_per_s", "tokens/s": "total_tokens_per_s"}  # fmt: skip
THROUGHPUT_LINE = re.compile(r"Throughput: (?P<rates>[\d.]+ requests/s(?:, [\d.]+ (?:total |output )?tokens/s)*)")
AVERAGE = re.compile(r"Avg latency: (?P<s>[\d.]+) seconds")
PERCENTILE = re.compile(r"(?P<percent>\d+)% percentile latency: (?P<s>[\d.]+) seconds")
TOTALS = re.compile(r"Total num (?P<what>prompt|output) tokens: +(?P<n>\d+)")


def _recognises(given: Given) -> bool:
    document = given.document
    if number(inner(document, "avg_latency")) is not None and isinstance(inner(document, "percentiles"), dict):
        return True
    return all(number(inner(document, name)) is not None for name in ("elapsed_time", "requests_per_second"))


def read_json(given: Given) -> list[Held]:
    document, told = given.document, {}
    if "avg_latency" in document:
        told["e2e_ms", "mean"] = document["avg_latency"], 1e3, "avg_latency"
        for key, value in document["percentiles"].items():
            told["e2e_ms", str(statistic_of(str(key)))] = value, 1e3, f"percentiles.{key}"
        return [_held(given.name, LATENCY, told)]
    told = {
        ("duration_s", "total"): (document["elapsed_time"], 1.0, "elapsed_time"),
        ("succeeded", "total"): (document.get("num_requests"), 1.0, "num_requests"),
        ("requests_per_s", "rate"): (document["requests_per_second"], 1.0, "requests_per_second"),
        ("total_tokens_per_s", "rate"): (document.get("tokens_per_second"), 1.0, "tokens_per_second"),
    }
    return [_held(given.name, THROUGHPUT, told)]


def read_printed(given: Given) -> list[Held]:
    """The last result of each kind."""
    latency: dict[tuple[str, str], tuple[Any, float, str]] = {}
    throughput: dict[tuple[str, str], tuple[Any, float, str]] = {}
    for line in given.lines:
        if (found := AVERAGE.search(line.text)) is not None:
            latency = {("e2e_ms", "mean"): (found["s"], 1e3, "Avg latency")}
        elif (found := PERCENTILE.search(line.text)) is not None:
            latency["e2e_ms", str(statistic_of(found["percent"]))] = found["s"], 1e3, "percentile latency"
        elif (found := THROUGHPUT_LINE.search(line.text)) is not None:
            for rate in found["rates"].split(", "):
                value, _, unit = rate.partition(" ")
                throughput[RATES[unit], "rate"] = value, 1.0, unit
        elif (found := TOTALS.search(line.text)) is not None:
            name = "input_tokens" if found["what"] == "prompt" else "output_tokens"
            throughput[name, "total"] = found["n"], 1.0, "Total num tokens"
    tools = ((LATENCY, latency), (THROUGHPUT, throughput))
    found = [_held(given.name, tool, told) for tool, told in tools if told]
    if not found:
        raise InputError("has no whole line of a result of vllm bench latency or throughput")
    return found


def _held(name: str, tool: str, told: dict[tuple[str, str], tuple[Any, float, str]]) -> Held:
    figures = BenchmarkFigures(tool=tool, figures=figures_of(CLOCKS, told))
    return Held(
        kind=f"result of {tool}", name=name, server="vllm", figures=figures, notes=prove(figures), missing=MISSING
    )


JSON = Reader(
    kind="results of `vllm bench latency` and `vllm bench throughput` (JSON)",
    shows="latency of a batch, rates of an engine without a server", recognises=_recognises, read=read_json,
)  # fmt: skip
PRINTED = Reader(
    kind="what `vllm bench latency` and `vllm bench throughput` print", shows="as their JSON", read=read_printed,
    shares_text=True,
    recognises=lambda given: found_in(AVERAGE, given.plain) or found_in(THROUGHPUT_LINE, given.plain),
)  # fmt: skip
