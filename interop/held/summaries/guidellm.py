"""GuideLLM's report: JSON and YAML of 0.3 to 0.8, its CSV of both forms, and the tables that it prints."""

import csv
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Held, Reader
from sojourn.interop.held.summaries.figures import figures_of, load_of, note_of_cut, prove, statistic_of
from sojourn.interop.imported import guidellm
from sojourn.interop.imported.result import Imported, Json, count, inner, number, word
from sojourn.metrics.errors import InputError

TOOL = "GuideLLM"
# GuideLLM's TPOT is not what others call so: since 0.4 it has the first token in it.
CLOCKS = {
    "ttft_ms": "client: request start to the first chunk with text",
    "tpot_ms": "client: first to last token, by output tokens - 1 (GuideLLM: inter token latency)",
    "e2e_per_token_ms": "client: request start to the last token, by all output tokens (GuideLLM: TPOT)",
    "e2e_ms": "client: request start to end",
    "requests_per_s": "client: mean of the measured part, without warm-up and cool-down",
    "output_tokens_per_s": "client: mean of the measured part, without warm-up and cool-down",
    "send_lag_ms": "client: targeted start to request start",
}  # fmt: skip
METRICS = {
    "request_latency": ("e2e_ms", 1e3), "time_to_first_token_ms": ("ttft_ms", 1.0),
    "inter_token_latency_ms": ("tpot_ms", 1.0), "time_per_output_token_ms": ("e2e_per_token_ms", 1.0),
    "prompt_token_count": ("input_tokens", 1.0), "output_token_count": ("output_tokens", 1.0),
    "request_concurrency": ("in_flight", 1.0), "requests_per_second": ("requests_per_s", 1.0),
    "output_tokens_per_second": ("output_tokens_per_s", 1.0), "tokens_per_second": ("total_tokens_per_s", 1.0),
    "prompt_tokens_per_second": ("input_tokens_per_s", 1.0), "request_dispatch_delay": ("send_lag_ms", 1e3),
}  # fmt: skip
RATES = {"requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "input_tokens_per_s"}
COUNTS = {"successful": "succeeded", "errored": "failed", "incomplete": "incomplete", "total": "requests"}
OLD_TPOT = re.compile(r"0\.[0-3]\.")  # its TPOT began at the first token
PERCENTILES = ("min", "p0.1", "p1", "p5", "p10", "p25", "p75", "p90", "p95", "p99", "max")
NOT_SHOWN = ["each request: the report holds percentiles only; write it with all requests",
             "anything of the server's own clock: its queue, KV cache and batch"]  # fmt: skip
# Groups of the CSV since 0.4 (first and second line of its head) → the metric.
GROUPS = {
    ("request latency", "sec"): "request_latency", ("time to first token", "ms"): "time_to_first_token_ms",
    ("time per output token", "ms"): "time_per_output_token_ms",
    ("inter token latency", "ms"): "inter_token_latency_ms", ("token metrics", "input tokens"): "prompt_token_count",
    ("token metrics", "output tokens"): "output_token_count", 
    ("server throughput", "requests/sec"): "requests_per_second",
    ("server throughput", "concurrency"): "request_concurrency",
    ("server throughput", "output tokens/sec"): "output_tokens_per_second",
    ("server throughput", "total tokens/sec"): "tokens_per_second",
    ("server throughput", "input tokens/sec"): "prompt_tokens_per_second",
    ("dispatch delay", "sec"): "request_dispatch_delay",
}  # fmt: skip


def _document(given: Given) -> Any:
    """The report, of JSON or YAML; None where it is none."""
    if given.documents:
        found = given.documents[0]
    elif re.search(r"^benchmarks:\s*$", given.text, re.MULTILINE) and "guidellm" in given.text:
        try:
            found = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(given.text).get_single_data()
        except (yaml.YAMLError, ValueError, RecursionError):
            return None
    else:
        return None
    benchmarks = inner(found, "benchmarks")
    is_report = isinstance(benchmarks, list) and all(isinstance(inner(each, "metrics"), dict) for each in benchmarks)
    return found if is_report and benchmarks else None


def read_report(given: Given) -> list[Held]:
    document = _document(given)
    runs = _requests(document)
    return [_held(given.name, document, each, runs.get(place)) for place, each in enumerate(document["benchmarks"])]


def _requests(document: Json) -> dict[int, Imported]:
    """By place: the benchmarks whose requests stand in the report and can be read."""
    try:
        return {place: each for place, each in enumerate(guidellm.read(document)) if each.refused is None and each.rows}
    except (InputError, KeyError, AttributeError, TypeError, ValueError):
        return {}


def _held(name: str, document: Json, benchmark: Json, requests: Imported | None) -> Held:
    strategy = inner(benchmark, "config", "strategy") or inner(benchmark, "args", "strategy") or {}
    version = word(inner(document, "metadata", "guidellm_version"))
    told: dict[tuple[str, str], tuple[Any, float, str]] = {}
    for theirs, summary in benchmark["metrics"].items():
        if theirs in METRICS and isinstance(summary, dict):
            told |= _distribution(theirs, summary)
    totals = inner(benchmark, "metrics", "request_totals") or inner(benchmark, "request_totals") or {}
    told |= {(ours, "total"): (totals.get(theirs), 1.0, f"request_totals.{theirs}") for theirs, ours in COUNTS.items()}
    told["duration_s", "total"] = benchmark.get("duration"), 1.0, "duration"
    kind = word(inner(strategy, "type_")) or ""
    if kind in guidellm.OPEN and ("send_lag_ms", "mean") not in told:
        lag = inner(benchmark, "scheduler_metrics", "request_targeted_start_delay_avg")
        told["send_lag_ms", "mean"] = lag, 1e3, "request_targeted_start_delay_avg"
    load = load_of(
        process=kind, request_rate=number(inner(strategy, "rate")) if kind in guidellm.OPEN else None,
        max_concurrency=count(inner(strategy, "streams")) or (1 if kind == "synchronous" else None),
    )  # fmt: skip
    figures = _figures(
        version, told, f"{kind} {load.get('max_concurrency', load.get('request_rate', ''))}".strip(), load
    )
    model = requests.model if requests is not None else inner(benchmark, "config", "backend", "model")
    return Held(
        kind="report of GuideLLM", name=name, figures=figures, requests=requests, notes=prove(figures),
        settings=load_of(model=model), missing=[] if requests is not None else NOT_SHOWN,
    )  # fmt: skip


def _figures(version: str | None, told: Mapping[Any, Any], label: str, load: dict[str, Any]) -> BenchmarkFigures:
    if version is None or OLD_TPOT.match(version):  # its TPOT meant something else, or nobody knows what
        told = {key: value for key, value in told.items() if key[0] != "e2e_per_token_ms"}
    return BenchmarkFigures(tool=TOOL, version=version, label=label, load=load, figures=figures_of(CLOCKS, told))


def _distribution(theirs: str, summary: Json) -> dict[tuple[str, str], tuple[Any, float, str]]:
    """Of the requests that succeeded."""
    name, factor = METRICS[theirs]
    group = summary.get("successful") or {}
    stated = {key: group.get(key) for key in ("mean", "median", "std_dev", "min", "max")}
    stated |= {
        key: value for key, value in (group.get("percentiles") or {}).items() if key not in ("p001", "p01", "p999")
    }
    stated |= {"p99.9": inner(group, "percentiles", "p999")}
    if not count(group.get("count")):  # zeros of nothing
        return {}
    return dict(_told(name, factor, theirs, stated))


def _told(
    name: str, factor: float, theirs: str, stated: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, str], tuple[Any, float, str]]]:
    for key, value in stated.items():
        statistic = statistic_of(re.sub(r"^p0(\d)$", r"p\1", key))
        if statistic is not None and (name not in RATES or statistic == "mean"):
            yield (name, "rate" if name in RATES else statistic), (value, factor, theirs)


def _rows(given: Given) -> list[list[str]]:
    try:
        return [row for row in csv.reader(io.StringIO(given.text)) if row] if "," in given.text[:5000] else []
    except csv.Error:
        return []


def _is_csv(given: Given) -> bool:
    head = [row.lower() for row in given.text[:200_000].split("\n", 3)[:3]]
    flat = head[0].startswith("type,run id") and "time to first token" in head[0]
    return flat or (len(head) == 3 and "mean,median" in head[2] and "time to first token" in head[0])


def read_csv(given: Given) -> list[Held]:
    rows = _rows(given)
    if len(rows) > 1 and "Type" in rows[0] and any(cell.endswith(" mean") for cell in rows[0]):
        found = [_of_flat(rows[0], row) for row in rows[1:]]
    else:
        place = next((n for n, row in enumerate(rows) if "Mean" in row and "Median" in row), None)
        if place is None or place < 2 or len(rows) == place + 1:
            raise InputError(
                "is GuideLLM's CSV without its three lines of head, or without a benchmark; export it again"
            )
        found = [_of_groups(rows[place - 2], rows[place - 1], rows[place], row) for row in rows[place + 1 :]]
    return [
        Held(
            kind="CSV of GuideLLM",
            name=given.name,
            figures=each,
            missing=NOT_SHOWN,
            notes=[*prove(each), *note_of_cut(given)],
        )
        for each in found
    ]


def _list(cell: str) -> dict[str, Any]:
    """Percentiles, which a cell holds as a list."""
    values = [number(each.strip()) for each in cell.strip("[] ").split(",")]
    return dict(zip(PERCENTILES, values, strict=True)) if len(values) == len(PERCENTILES) else {}


def _of_flat(head: list[str], row: list[str]) -> BenchmarkFigures:
    cells, told = dict(zip(head, row, strict=False)), {}
    for theirs, (name, factor) in METRICS.items():
        shown = f"Successful {theirs.replace('_', ' ').capitalize()}"
        stated = {word_: cells.get(f"{shown} {word_}") for word_ in ("mean", "median")}
        stated |= _list(cells.get(f"{shown} [min, 0.1, 1, 5, 10, 25, 75, 90, 95, 99, max]", ""))
        told |= dict(_told(name, factor, shown, stated))
    told |= {(ours, "total"): (cells.get(f"{theirs.capitalize()} Requests"), 1.0, f"{theirs} requests")
             for theirs, ours in COUNTS.items()}  # fmt: skip
    told["duration_s", "total"] = cells.get("Duration"), 1.0, "Duration"
    return _figures(None, told, cells.get("Name", ""), {})


def _of_groups(groups: list[str], units: list[str], statistics: list[str], row: list[str]) -> BenchmarkFigures:
    told: dict[tuple[str, str], tuple[Any, float, str]] = {}
    label, version = "", None
    for group, unit, statistic, cell in zip(groups, units, statistics, row, strict=False):
        metric = GROUPS.get((group.lower(), unit.lower().removeprefix("successful ")))
        if metric is not None and not unit.lower().startswith(("incomplete", "errored")):
            stated = _list(cell) if statistic == "Percentiles" else {statistic.lower().replace(" ", "_"): cell}
            told |= dict(_told(*METRICS[metric], group, stated))
        elif group == "Request Counts" and unit.lower() in COUNTS:
            told[COUNTS[unit.lower()], "total"] = cell, 1.0, f"{unit} requests"
        elif (group, unit) == ("Timings", "Duration"):
            told["duration_s", "total"] = cell, 1.0, "Duration"
        elif (group, unit) == ("Benchmark", "Strategy"):
            kind = re.search(r"type_='(\w+)'", cell)
            label = kind[1] if kind else cell[:40]
        elif (group, unit) == ("Runtime Info", "Metadata"):
            stated_version = re.search(r'"guidellm_version": ?"([^"]+)"', cell)
            version = stated_version[1] if stated_version else None
    return _figures(version, told, label, {})


REPORT = Reader(
    kind="GuideLLM's report (JSON, YAML)",
    shows="percentiles of each benchmark of a sweep, failures; a run where requests are in it",
    recognises=lambda given: _document(given) is not None, read=read_report,
)  # fmt: skip
CSV = Reader(
    kind="GuideLLM's CSV (0.3, and since 0.4 with three lines of head)", shows="percentiles of each benchmark",
    recognises=_is_csv, read=read_csv,
)  # fmt: skip
