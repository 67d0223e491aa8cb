"""Summaries of load generators that know HTTP and no tokens: Locust, k6, oha; and llmperf, which counts its own."""

import csv
import io
import re
from typing import Any

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Held, Reader
from sojourn.interop.held.summaries.figures import (
    figures_of,
    load_of,
    milliseconds,
    note_of_cut,
    prove,
    statistic_of,
    told_of,
)
from sojourn.interop.imported.result import Json, count, inner, number, word
from sojourn.metrics.errors import InputError

Told = dict[tuple[str, str], tuple[Any, float, str]]
NO_TOKENS = "tokens: the tool measures an HTTP request, and not the first token or the time between tokens"
LOCUST = {"response_ms": "client: request to the end of the response; with stream=True only to its headers"}
K6 = {
    "response_ms": "client: sending to the end of the response, without connecting",
    "ttft_ms": "client: request sent to the first byte of the response (http_req_waiting)",
}  # fmt: skip
OHA = {"response_ms": "client: request to the end of the response"}
LOCUST_HEADS = (("Request Count", "Failure Count"), ("User Count", "Total Failure Count"))
LLMPERF = {
    "ttft_ms": "client: request start to the first chunk", "e2e_ms": "client: request start to the last chunk",
    "e2e_per_token_ms": "client: E2E by output tokens (llmperf: inter token latency)",
    "tokens_per_s_per_user": "client: output tokens by E2E of a request",
}  # fmt: skip
LLMPERF_NAMES = {"ttft_s": ("ttft_ms", 1e3), "inter_token_latency_s": ("e2e_per_token_ms", 1e3),
                 "end_to_end_latency_s": ("e2e_ms", 1e3), "number_output_tokens": ("output_tokens", 1.0),
                 "number_input_tokens": ("input_tokens", 1.0),
                 "request_output_throughput_token_per_s": ("tokens_per_s_per_user", 1.0)}  # fmt: skip
LLMPERF_KEY = re.compile(rf"results_({'|'.join(LLMPERF_NAMES)})_(?:quantiles_)?(\w+)")


def _held(name: str, tool: str, clocks: Json, told: Told, load: Json, missing: list[str], notes: list[str]) -> Held:
    figures = BenchmarkFigures(tool=tool, figures=figures_of(clocks, told), load=load)
    return Held(kind=f"summary of {tool}", name=name, figures=figures, notes=[*notes, *prove(figures)], missing=missing)


def _is_llmperf(given: Given) -> bool:
    return isinstance(given.document, dict) and any(LLMPERF_KEY.fullmatch(str(key)) for key in given.document)


def read_llmperf(given: Given) -> list[Held]:
    document, told = given.document, {}
    for key, value in document.items():
        if (found := LLMPERF_KEY.fullmatch(key)) is not None and (statistic := statistic_of(found[2])) is not None:
            name, factor = LLMPERF_NAMES[found[1]]
            told[name, statistic] = value, factor, key
    per_minute = number(document.get("results_num_completed_requests_per_min"))
    made = number(document.get("results_num_completed_requests"))
    told |= {
        ("requests", "total"): (document.get("results_num_requests_started"), 1.0, "num_requests_started"),
        ("succeeded", "total"): (made, 1.0, "num_completed_requests"),
        ("failed", "total"): (document.get("results_number_errors"), 1.0, "number_errors"),
        ("requests_per_s", "rate"): (per_minute, 1 / 60, "num_completed_requests_per_min"),
        ("output_tokens_per_s", "rate"):
            (document.get("results_mean_output_throughput_token_per_s"), 1.0, "mean_output_throughput_token_per_s"),
    }  # fmt: skip
    load = load_of(max_concurrency=count(document.get("num_concurrent_requests")))
    found_held = _held(
        given.name, "llmperf", LLMPERF, told, load, ["each request: give *_individual_responses.json"], []
    )
    return [found_held]


def _answers(given: Given) -> list[Json]:
    """Rows of llmperf's *_individual_responses.json."""
    rows = given.document if isinstance(given.document, list) else []
    return [row for row in rows if isinstance(row, dict) and {"ttft_s", "end_to_end_latency_s"} & set(row)]


def read_llmperf_rows(given: Given) -> list[Held]:
    rows = _answers(given)
    good = [row for row in rows if not row.get("error_code")]
    columns = {ours: [factor * value for row in good if (value := number(row.get(theirs))) is not None]
               for theirs, (ours, factor) in LLMPERF_NAMES.items()}  # fmt: skip
    told: Told = told_of(columns, "rows")
    told["succeeded", "total"] = len(good), 1.0, "rows"
    told["failed", "total"] = len(rows) - len(good), 1.0, "error_code"
    missing = ["when each request was sent: the rows have no moment"]
    return [_held(given.name, "llmperf", LLMPERF, told, {}, missing, [])]


def _rows(given: Given) -> list[dict[str, str]]:
    try:
        return list(csv.DictReader(io.StringIO(given.text)))
    except csv.Error:
        return []


def _is_locust(given: Given) -> bool:
    head = given.text[:400].split("\n", 1)[0]
    return any(set(names) <= set(re.findall(r"[\w ]+", head)) for names in LOCUST_HEADS)


def read_locust(given: Given) -> list[Held]:
    rows = _rows(given)
    if rows and "User Count" in rows[0]:
        raise InputError("is Locust's history; give NAME_stats.csv of the same run")
    whole = next((row for row in rows if row["Name"] == "Aggregated"), rows[0] if len(rows) == 1 else None)
    if whole is None:
        raise InputError("has no line Aggregated; is it cut off? Give NAME_stats.csv")
    told: Told = {
        ("response_ms", statistic): (whole.get(f"{word_} Response Time"), 1.0, f"{word_} Response Time")
        for word_, statistic in (("Median", "median"), ("Average", "mean"), ("Min", "min"), ("Max", "max"))
    }
    for column, cell in whole.items():
        if column and re.fullmatch(r"[\d.]+%", column) and (statistic := statistic_of(column)) not in (None, "median"):
            told["response_ms", str(statistic)] = cell, 1.0, column
    made, failed = number(whole.get("Request Count")) or 0.0, number(whole.get("Failure Count"))
    told |= {
        ("requests", "total"): (made, 1.0, "Request Count"), ("failed", "total"): (failed, 1.0, "Failure Count"),
        ("succeeded", "total"): (made - (failed or 0), 1.0, "Request Count - Failure Count"),
        ("offered_requests_per_s", "rate"): (whole.get("Requests/s"), 1.0, "Requests/s"),
    }  # fmt: skip
    names = sorted({row["Name"] for row in rows if row["Name"] != "Aggregated"})
    notes = [f"{len(names)} kinds of requests are added up: {', '.join(names)[:60]}"] if len(names) > 1 else []
    return [_held(given.name, "Locust", LOCUST, told, {}, [NO_TOKENS], [*notes, *note_of_cut(given)])]


def _is_k6(given: Given) -> bool:
    return isinstance(inner(given.document, "metrics", "http_req_duration"), dict)


def read_k6(given: Given) -> list[Held]:
    metrics = {name: each.get("values", each) for name, each in given.document["metrics"].items()}
    told: Told = {}
    for theirs, ours in (("http_req_duration", "response_ms"), ("http_req_waiting", "ttft_ms")):
        told |= _k6_trend(ours, theirs, metrics.get(theirs) or {})
    made, wrong = inner(metrics, "http_reqs") or {}, inner(metrics, "http_req_failed") or {}
    share = number(wrong.get("rate", wrong.get("value")))
    requests = number(made.get("count"))
    failed = share * requests if share is not None and requests is not None else None
    told |= {
        ("requests", "total"): (requests, 1.0, "http_reqs"), ("failed", "total"): (failed, 1.0, "http_req_failed"),
        ("offered_requests_per_s", "rate"): (made.get("rate"), 1.0, "http_reqs"),
        ("dropped", "total"): (inner(metrics, "dropped_iterations", "count"), 1.0, "dropped_iterations"),
        ("duration_s", "total"): (inner(given.document, "state", "testRunDurationMs"), 1e-3, "testRunDurationMs"),
    }  # fmt: skip
    load = load_of(max_concurrency=count(inner(metrics, "vus_max", "value") or inner(metrics, "vus_max", "max")))
    return [_held(given.name, "k6", K6, told, load, [NO_TOKENS], [])]


def _k6_trend(ours: str, theirs: str, summary: Json) -> Told:
    stated = ((statistic_of(key), value) for key, value in summary.items() if key != "count")
    return {(ours, statistic): (value, 1.0, theirs) for statistic, value in stated if statistic is not None}


K6_LINE = re.compile(
    r"[✓✗]? *(http_req_duration|http_req_waiting|http_reqs|http_req_failed|dropped_iterations)\.*: (.*)"
)


def read_k6_text(given: Given) -> list[Held]:
    told: Told = {}
    for line in given.lines:
        if (found := K6_LINE.fullmatch(line.text.strip())) is None:
            continue
        name, rest = found.groups()
        if name in ("http_req_duration", "http_req_waiting"):
            ours = "response_ms" if name == "http_req_duration" else "ttft_ms"
            for word_, shown in re.findall(r"(avg|min|med|max|p\([\d.]+\))=(\S+)", rest):
                told[ours, str(statistic_of(word_))] = milliseconds(shown), 1.0, name
        elif name == "http_req_failed":
            counted = re.search(r"(\d+) out of \d+", rest) or re.search(r"✓ *(\d+)", rest)  # older: ✓ counts the failed
            told["failed", "total"] = counted[1] if counted else None, 1.0, name
        else:
            numbers = re.findall(r"[\d.]+", rest)
            told["requests" if name == "http_reqs" else "dropped", "total"] = numbers[0] if numbers else None, 1.0, name
    return [_held(given.name, "k6", K6, told, {}, [NO_TOKENS], [])]


def _is_oha(given: Given) -> bool:
    return isinstance(inner(given.document, "summary"), dict) and isinstance(
        inner(given.document, "latencyPercentiles"), dict
    )


def read_oha(given: Given) -> list[Held]:
    document = given.document
    summary = document["summary"]
    told: Told = {("response_ms", statistic): (summary.get(theirs), 1e3, theirs)
                  for theirs, statistic in (("average", "mean"), ("slowest", "max"), ("fastest", "min"))}  # fmt: skip
    told |= {("response_ms", str(statistic_of(key))): (value, 1e3, key)
             for key, value in document["latencyPercentiles"].items() if statistic_of(key) is not None}  # fmt: skip
    codes = {str(key): count(value) or 0 for key, value in (document.get("statusCodeDistribution") or {}).items()}
    errors = sum(count(value) or 0 for value in (document.get("errorDistribution") or {}).values())
    good = sum(value for key, value in codes.items() if key.startswith("2"))
    told |= {
        ("duration_s", "total"): (summary.get("total"), 1.0, "total"),
        ("offered_requests_per_s", "rate"): (summary.get("requestsPerSec"), 1.0, "requestsPerSec"),
    }  # fmt: skip
    if codes or errors:
        told |= {("requests", "total"): (sum(codes.values()) + errors, 1.0, "statusCodeDistribution"),
                 ("succeeded", "total"): (good, 1.0, "statusCodeDistribution"),
                 ("failed", "total"): (sum(codes.values()) - good + errors, 1.0, "statusCodeDistribution")}  # fmt: skip
    notes = [f"errors: {word(next(iter(document['errorDistribution']), '')) or ''}"] if errors else []
    return [_held(given.name, "oha", OHA, told, {}, [NO_TOKENS], notes)]


READERS = (
    Reader(kind="llmperf's *_summary.json", shows="percentiles, failures", recognises=_is_llmperf, read=read_llmperf),
    Reader(kind="llmperf's *_individual_responses.json", shows="percentiles, failures; no time",
           recognises=lambda given: bool(_answers(given)), read=read_llmperf_rows),
    Reader(kind="Locust's NAME_stats.csv", shows="response times, failures", recognises=_is_locust, read=read_locust),
    Reader(kind="k6's summary (JSON)", shows="response times, failures, iterations that were dropped",
           recognises=_is_k6, read=read_k6),
    Reader(kind="oha's JSON", shows="response times, failures", recognises=_is_oha, read=read_oha),
    Reader(kind="the summary that k6 prints", shows="as its JSON", read=read_k6_text, shares_text=True,
           recognises=lambda given: re.search(r"http_req_duration\.*: avg=", given.plain) is not None),
)  # fmt: skip
