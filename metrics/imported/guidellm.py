"""GuideLLM's report as JSON (`--output kind=json`), as 0.8 writes it. One file may hold several benchmarks.

Times are seconds of the wall clock. Of the tokens only the first and the last have a time.
"""

from typing import Any

from metrics.errors import InputError
from metrics.imported.result import Imported, Json, count, inner, need_times, ns, word
from metrics.records import ClientRecord

TOOL = "GuideLLM"
SLOS = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "e2el_ms": "e2e_ms"}
GROUPS = {"successful": "ok", "errored": "error", "incomplete": "cancelled"}
UNSEEN = [
    "the time of each token: only the first and the last have one, so time between tokens is a mean of each request",
    "tenants and classes",
]


def recognises(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("benchmarks"), list) and "metadata" in document


def read(document: Json) -> list[Imported]:
    """One a benchmark. Raises InputError where a report has none, or its requests were left out."""
    if not document["benchmarks"]:
        raise InputError("the report holds no benchmark")
    return [_benchmark(document, each, number) for number, each in enumerate(document["benchmarks"])]


def _benchmark(document: Json, benchmark: Any, number: int) -> Imported:
    groups = inner(benchmark, "requests")
    if not isinstance(groups, dict) or not any(groups.get(name) for name in GROUPS):
        raise InputError(f"benchmark {number} of the report lists no request; write it with all requests")
    rows = [_row(entry, status) for name, status in GROUPS.items() for entry in groups.get(name) or []]
    slo = {ours: inner(benchmark, "config", "slo", name) for name, ours in SLOS.items()}
    bounds = {name: bound for name, bound in slo.items() if isinstance(bound, int | float) and bound > 0}
    strategy, backend = inner(benchmark, "config", "strategy"), inner(document, "config", "spec", "backend")
    return Imported(
        tool=TOOL, version=word(inner(document, "metadata", "guidellm_version")),
        name=f"guidellm-{word(inner(strategy, 'type_')) or 'benchmark'}-{number}", model=word(inner(backend, "model")),
        base_url=word(inner(backend, "target")), rows=sorted(rows, key=lambda row: row.due_ns), unseen=UNSEEN,
        arrivals=_arrivals(strategy), is_unix_time=True,
        objectives=[{"klass": "all", "source": "the result file", **bounds}] if bounds else [],
    )  # fmt: skip


def _arrivals(strategy: Any) -> Json:
    kind, streams, rate = (inner(strategy, name) for name in ("type_", "streams", "rate"))
    if kind in ("concurrent", "synchronous", "throughput"):
        limit = 1 if kind == "synchronous" else streams or inner(strategy, "max_concurrency")
        return {"process": "concurrency", "in_flight": limit} if limit else {"process": "at_once"}
    return {"process": {"constant": "constant", "poisson": "poisson"}.get(kind, "times"), "rate_rps": rate}


def _row(entry: Json, status: str) -> ClientRecord:
    times = inner(entry, "info", "timings") or {}
    stamps = {name: ns(times.get(name)) for name in (
        "targeted_start", "request_start", "first_token_iteration", "last_token_iteration", "request_end",
    )}  # fmt: skip
    sent = stamps["request_start"]
    due = stamps["targeted_start"] or sent
    if due is None:
        due = ns(times.get("queued"))
    need_times(TOOL, 0, targeted_start=due)
    error = word(inner(entry, "info", "error"))
    return ClientRecord(
        request_id=str(entry.get("request_id")), scenario="", due_ns=due, sent_ns=sent,
        first_token_ns=stamps["first_token_iteration"], last_token_ns=stamps["last_token_iteration"],
        last_byte_ns=stamps["request_end"] if sent is not None else None, status=status,
        error=error or (None if status == "ok" else status),
        session_id=word(inner(entry, "info", "conversation_id")) or "",
        turn=count(inner(entry, "info", "turn_index")) or 0,
        prompt_tokens=count(entry.get("prompt_tokens")), output_tokens=count(entry.get("output_tokens")),
        cached_tokens=count(entry.get("cached_tokens")),
    )  # fmt: skip
