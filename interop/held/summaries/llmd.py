"""Benchmark Reports of llm-d, versions 0.1 to 0.2.1 (JSON or YAML): what its harnesses measured, in one form."""

from typing import Any

import yaml

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Held, Reader
from sojourn.interop.held.summaries.figures import IN_MS, figures_of, load_of, prove, statistic_of
from sojourn.interop.imported.result import Json, count, inner, number, word
from sojourn.metrics.errors import InputError

LATENCIES = {
    "time_to_first_token": "ttft_ms", "time_per_output_token": "tpot_ms", "inter_token_latency": "itl_ms",
    "request_latency": "e2e_ms", "normalized_time_per_output_token": "e2e_per_token_ms",
}  # fmt: skip
RATES = {
    "input_token_rate": "input_tokens_per_s", "output_token_rate": "output_tokens_per_s",
    "total_token_rate": "total_tokens_per_s", "request_rate": "requests_per_s",
    # of version 0.1
    "output_tokens_per_sec": "output_tokens_per_s", "total_tokens_per_sec": "total_tokens_per_s",
    "requests_per_sec": "requests_per_s",
}  # fmt: skip
LENGTHS = {"input_length": "input_tokens", "output_length": "output_tokens"}
CLOCKS = dict.fromkeys(LATENCIES.values(), "client: as the harness measures it, from its send")
NOT_SHOWN = ["each request: give the harness's own file, from which the report was made"]
Told = dict[tuple[str, str], tuple[Any, float, str]]


def _document(given: Given) -> Json | None:
    """The report; None where it is none. YAML is parsed only where its words are there."""
    if isinstance(given.document, dict):
        return given.document if _performance(given.document) else None
    text = given.text
    if "scenario:" not in text or "version:" not in text or "time_to_first_token:" not in text:
        return None
    try:
        found = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text).get_single_data()
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _performance(found) else None


def _performance(document: Json) -> Json | None:
    """Requests, latency and throughput, wherever the version has them."""
    found = inner(document, "results", "request_performance", "aggregate") or document.get("metrics")
    is_report = isinstance(found, dict) and "version" in document and "scenario" in document
    return found if is_report and isinstance(found.get("latency"), dict) else None


def read(given: Given) -> list[Held]:
    document = _document(given)
    made = _performance(document) if document is not None else None
    if made is None:
        raise InputError("it is no Benchmark Report of llm-d")
    told: Told = {}
    for theirs, ours in LATENCIES.items():
        told |= _statistics(ours, inner(made, "latency", theirs), theirs)
    for theirs, ours in LENGTHS.items():
        told |= _statistics(ours, inner(made, "requests", theirs), theirs)
    for theirs, ours in RATES.items():
        rate = inner(made, "throughput", theirs)
        if rate is not None:  # each version has its own name
            told[ours, "rate"] = inner(rate, "mean") if isinstance(rate, dict) else rate, 1.0, theirs
    told["requests", "total"] = inner(made, "requests", "total"), 1.0, "requests.total"
    told["failed", "total"] = inner(made, "requests", "failures"), 1.0, "requests.failures"
    load = inner(document, "scenario", "load", "standardized") or {}
    rate, slots = load.get("rate_qps"), load.get("concurrency")
    figures = BenchmarkFigures(
        tool=word(load.get("tool")) or "llm-d", version=word(load.get("tool_version")),
        figures=figures_of(CLOCKS, told), label=f"{rate:g} requests/s" if number(rate) else "",
        load=load_of(request_rate=number(rate), max_concurrency=count(slots)),
    )  # fmt: skip
    return [
        Held(
            kind=f"Benchmark Report {document['version']} of llm-d", name=given.name, figures=figures,
            notes=prove(figures), missing=NOT_SHOWN, settings=_settings(document),
        )
    ]  # fmt: skip


def _statistics(ours: str, summary: Any, theirs: str) -> Told:
    """Raises InputError for a latency of an unknown unit."""
    if not isinstance(summary, dict):
        return {}
    factor = 1.0
    if ours.endswith("_ms"):
        units = str(summary.get("units", "")).removesuffix("/token")
        if units not in IN_MS:
            raise InputError(f"{theirs} has the units {summary.get('units')!r}; known are s, ms, s/token and ms/token")
        factor = IN_MS[units]
    return {(ours, statistic): (value, factor, theirs) for key, value in summary.items()
            if (statistic := statistic_of(key)) is not None}  # fmt: skip


def _settings(document: Json) -> dict[str, Any]:
    """Of the first inference engine of the stack; `gpus` are those of all, each engine's count in all its replicas."""
    stack = inner(document, "scenario", "stack")
    parts = [inner(component, "standardized") for component in (stack if isinstance(stack, list) else ())]
    engines = [each for each in parts if isinstance(each, dict) and each.get("kind") == "inference_engine"]
    if not engines:
        return {}
    first = engines[0]
    counts = [number(inner(each, "accelerator", "count")) for each in engines]
    replicas = [number(each.get("replicas")) or 1 for each in engines]
    gpus = sum(count * times for count, times in zip(counts, replicas, strict=True) if count is not None)
    told = {
        "model": inner(first, "model", "name"), "hardware": inner(first, "accelerator", "model"),
        "gpus": None if None in counts else int(gpus),
        "server": first.get("tool"), "tensor_parallel_size": inner(first, "accelerator", "parallelism", "tp"),
    }  # fmt: skip
    return {name: value for name, value in told.items() if value not in (None, "")}


REPORT = Reader(
    kind="llm-d's Benchmark Report 0.1 to 0.2.1 (YAML, JSON)",
    shows="percentiles at the client, rates, failures, the stack",
    recognises=lambda given: _document(given) is not None, read=read,
)  # fmt: skip
