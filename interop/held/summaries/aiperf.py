"""Summaries of AIPerf (0.1 to 0.13) and of genai-perf, whose form AIPerf kept: JSON and CSV."""

import csv
import io
import re
from collections.abc import Iterator
from typing import Any

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Held, Reader
from sojourn.interop.held.summaries.figures import IN_MS, UNITS, figures_of, load_of, note_of_cut, prove, statistic_of
from sojourn.interop.imported import aiperf
from sojourn.interop.imported.result import Json, checked, count, inner, number, word
from sojourn.metrics.errors import InputError

CLOCKS = {
    "ttft_ms": "client: request sent to the first chunk that is not empty",
    "tpot_ms": "client: (request latency - TTFT) by output tokens - 1 (AIPerf: inter token latency)",
    "itl_ms": "client: between two chunks, all requests together (AIPerf: inter chunk latency)",
    "e2e_ms": "client: request sent to the last response",
    "tokens_per_s_per_user": "client: 1 by inter token latency",
    "requests_per_s": "client: first request to last response",
    "output_tokens_per_s": "client: first request to last response; reasoning tokens count",
}  # fmt: skip
# Tag or header, in lower case with "_" → our name, and whether it is a total of the run.
TAGS = {
    "time_to_first_token": "ttft_ms", "ttft": "ttft_ms", "inter_token_latency": "tpot_ms",
    "inter_chunk_latency": "itl_ms", "request_latency": "e2e_ms", "output_sequence_length": "output_tokens",
    "input_sequence_length": "input_tokens", "output_token_throughput_per_user": "tokens_per_s_per_user",
    "request_throughput": "requests_per_s", "output_token_throughput": "output_tokens_per_s",
    "goodput": "good_requests_per_s", "good_request_count": "good_requests", "request_count": "succeeded",
    "error_request_count": "failed", "benchmark_duration": "duration_s", "total_osl": "output_tokens",
    "total_isl": "input_tokens", "total_output_sequence_length": "output_tokens",
    "total_input_sequence_length": "input_tokens",
}  # fmt: skip
TOTAL = {"succeeded", "failed", "good_requests", "duration_s"}
COUNTED = {"tokens", "requests", "", "count", "tokens/sec", "tokens/sec/user", "tokens per second", "requests/sec",
           "per sec", "requests per second"}  # fmt: skip
HEADER = re.compile(r"(?P<name>[^(]+?)(?: \((?P<unit>[^)]*)\))?")
NOT_SHOWN = ["each request: give profile_export.jsonl of the same folder",
             "anything of the server's own clock, unless server metrics were exported"]  # fmt: skip


Told = dict[tuple[str, str], tuple[Any, float, str]]


def _metrics(document: Any) -> Json:
    """Tag → {unit, avg, p50, …}; {} where it is no summary."""
    records = inner(document, "records")
    told = records if isinstance(records, dict) else document
    if not isinstance(told, dict):
        return {}
    found = {tag: each for tag, each in told.items() if isinstance(each, dict) and {"unit", "avg"} <= set(each)}
    return found if set(found) & {"request_latency", "request_throughput"} else {}


def read_json(given: Given) -> list[Held]:
    document = given.document
    told: Told = {}
    for tag, metric in _metrics(document).items():
        stated = {key: value for key, value in metric.items() if key not in ("unit", "count", "sum", "tag", "header")}
        told |= dict(_told(tag, str(metric["unit"] or ""), stated))
    version = word(document.get("aiperf_version"))
    config = inner(document, "input_config") or {}
    loadgen = next((each for name in ("loadgen", "perf_analyzer") if (each := inner(config, name))), {})
    stimulus = inner(loadgen, "stimulus") or loadgen
    limit = count(inner(stimulus, "concurrency"))
    notes = _what_happened(document, told)
    tool = "AIPerf" if version or "records" in document or _is_aiperf(document) else "genai-perf"
    load = load_of(max_concurrency=limit, request_rate=number(inner(stimulus, "request_rate")))
    return [_held(given.name, told, tool, version, load, notes)]


def _what_happened(document: Json, told: Told) -> list[str]:
    """Notes on how the benchmark went; those that the tool cancelled are taken off the failures in `told`."""
    notes = ["the benchmark was cancelled before its end"] if document.get("was_cancelled") is True else []
    if document.get("is_complete") is False:
        notes.append(
            f"the benchmark is not complete: {word(document.get('incomplete_reason')) or 'no reason is given'}"
        )
    cut = sum(count(inner(each, "count")) or 0 for each in document.get("error_summary") or ()
              if inner(each, "error_details", "type") == "RequestCancellationError")  # fmt: skip
    if cut:
        notes.append(
            f"{cut} of the failed requests were cancelled by the tool itself: they are no failure of the server"
        )
        failed = number(told.get(("failed", "total"), (0.0, 1.0, ""))[0]) or 0.0
        told["failed", "total"] = max(0.0, failed - cut), 1.0, "error_request_count without those cancelled"
    return notes


def _is_aiperf(document: Json) -> bool:
    return "error_summary" in document or isinstance(inner(document, "input_config", "endpoint"), dict)


def _told(tag: str, unit: str, stated: Json) -> Iterator[tuple[tuple[str, str], tuple[Any, float, str]]]:
    """Raises InputError for a unit that is not known."""
    name = TAGS.get(re.sub(r"[ _]+", "_", tag.strip().lower()))
    if name is None:
        return
    factor = _factor(tag, unit.strip().lower(), UNITS[name])
    for key, value in stated.items():
        statistic = statistic_of(key)
        if statistic is None:
            continue
        if name in TOTAL or tag.lower().startswith("total"):
            statistic = "total" if statistic == "mean" else ""
        elif UNITS[name].endswith("/s") and name != "tokens_per_s_per_user":
            statistic = "rate" if statistic == "mean" else ""
        if statistic:
            yield (name, statistic), (value, factor, tag)


def _factor(tag: str, unit: str, ours: str) -> float:
    if ours in ("ms", "s"):
        if unit not in IN_MS:
            raise InputError(f"{tag} is in {unit or 'no unit'}, which is no time")
        return IN_MS[unit] if ours == "ms" else IN_MS[unit] / 1e3
    if unit not in COUNTED:
        raise InputError(f"{tag} is in {unit}, which is not known")
    return 1.0


def _held(name: str, told: Json, tool: str, version: str | None, load: Json, notes: list[str]) -> Held:
    label = f"concurrency {load['max_concurrency']}" if "max_concurrency" in load else ""
    figures = BenchmarkFigures(
        tool=tool, version=version, label=label, load=load, figures=figures_of(CLOCKS, told)
    )  # fmt: skip
    return Held(
        kind=f"summary of {tool}", name=name, figures=figures, notes=[*notes, *prove(figures)], missing=NOT_SHOWN
    )


def _sections(given: Given) -> list[tuple[list[str], list[list[str]]]]:
    """The tables of the CSV: head and rows. One begins where the first cell is `Metric`."""
    found: list[tuple[list[str], list[list[str]]]] = []
    try:
        rows = list(csv.reader(io.StringIO(given.text)))
    except csv.Error:
        return []
    for row in rows:
        if row and row[0] in ("Metric", "Endpoint"):
            found.append((row, []))
        elif row and found and row[0]:
            found[-1][1].append(row)
    return [each for each in found if each[0][0] == "Metric"]


def _is_csv(given: Given) -> bool:
    head = given.text[:3000].lower()
    return given.text.startswith("Metric,") and "request" in head and not given.documents


def read_csv(given: Given) -> list[Held]:
    told: Told = {}
    for head, rows in _sections(given):
        names = ["avg" if name == "Value" else name for name in head[1:]]
        for row in rows:
            shown = HEADER.fullmatch(row[0])
            if shown is not None:
                tag, unit = _tag_and_unit(shown["name"], shown["unit"] or "")
                cells = {name: cell.replace(",", "") for name, cell in zip(names, row[1:], strict=False)}
                told |= dict(_told(tag, unit, cells))
    if not told:
        raise InputError("is a CSV with a column Metric, and has no metric of AIPerf or genai-perf")
    return [_held(given.name, told, "AIPerf or genai-perf", None, {}, note_of_cut(given))]


def _tag_and_unit(name: str, unit: str) -> tuple[str, str]:
    """genai-perf writes `Output Token Throughput (per sec)`."""
    return name, {"per sec": "tokens/sec" if "token" in name.lower() else "requests/sec"}.get(unit, unit)


def _is_lines(given: Given) -> bool:
    return bool(given.documents) and all(map(aiperf.recognises, given.documents))


def read_lines(given: Given) -> list[Held]:
    return [Held(kind="requests of AIPerf", name=given.name, requests=checked(each))
            for each in aiperf.read_lines(given.documents)]  # fmt: skip


JSON = Reader(
    kind="AIPerf's profile_export_aiperf.json and genai-perf's profile_export_genai_perf.json",
    shows="percentiles, failures and what was cancelled", recognises=lambda given: bool(_metrics(given.document)),
    read=read_json,
)  # fmt: skip
CSV = Reader(
    kind="the CSV of AIPerf and genai-perf", shows="percentiles, failures", recognises=_is_csv, read=read_csv,
)  # fmt: skip
LINES = Reader(kind="AIPerf's profile_export.jsonl", shows="a run", recognises=_is_lines, read=read_lines)
