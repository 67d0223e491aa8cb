"""GuideLLM's report as JSON, as 0.3 to 0.8 write it. One file may hold several benchmarks.

Times are seconds of the wall clock. Of the tokens only the first and the last have a time. In a closed loop a request
is due when it was sent: GuideLLM writes the start of the benchmark there, or the end of another request.
"""

from typing import Any

from sojourn.interop.imported.result import Imported, Json, checked, count, cut_by_the_tool, inner, need_times, ns, word
from sojourn.metrics.errors import InputError
from sojourn.metrics.records import ClientRecord

TOOL = "GuideLLM"
SLOS = {"ttft_ms": "ttft_ms", "tpot_ms": "tpot_ms", "e2el_ms": "e2e_ms"}
JUDGED = {"successful": "ok", "errored": "error"}
CUT = "incomplete"  # in flight when a limit of GuideLLM ended the benchmark
CLOSED = ("concurrent", "synchronous", "throughput")
OPEN = {"constant": "constant", "poisson": "poisson", "trace": "times"}
UNSEEN = [
    "the time of each token: only the first and the last have one, so time between tokens is a mean of each request",
    "tenants and classes",
]
# Our name → the names in `info.timings` (0.4 and later), in `scheduler_info` and in the request itself (0.3).
STAMPS = {
    "due": ("targeted_start", "targeted_start_time"), "sent": ("request_start", "start_time"),
    "first": ("first_token_iteration", "first_iteration", "first_token_time"),
    "last": ("last_token_iteration", "last_iteration", "last_token_time"), "end": ("request_end", "end_time"),
    "queued": ("queued", "queued_time"),
}  # fmt: skip


def recognises(document: Any) -> bool:
    benchmarks = inner(document, "benchmarks")
    if not isinstance(benchmarks, list):
        return False
    return "metadata" in document or any(isinstance(inner(each, "requests"), dict) for each in benchmarks)


def read(document: Json) -> list[Imported]:
    """One a benchmark. Raises InputError where a report has none, or its requests were left out."""
    if not document["benchmarks"]:
        raise InputError("the report holds no benchmark")
    return [_readable(document, each, number) for number, each in enumerate(document["benchmarks"])]


def _readable(document: Json, benchmark: Any, number: int) -> Imported:
    """The benchmark, or why it is none: in a sweep the others can still be read."""
    try:
        return checked(_benchmark(document, benchmark, number))
    except InputError as error:
        if len(document["benchmarks"]) == 1:
            raise
        return Imported(tool=TOOL, version=None, name=f"guidellm-{number} (cannot be read)", model=None, rows=[],
                        unseen=[], arrivals={}, refused=str(error))  # fmt: skip


def _benchmark(document: Json, benchmark: Any, number: int) -> Imported:
    strategy = inner(benchmark, "config", "strategy") or inner(benchmark, "args", "strategy")
    groups = _groups(benchmark, number)
    cut = groups.pop(CUT)
    rows = _rows(benchmark, strategy, groups)
    outside = sum(map(len, groups.values())) - sum(map(len, rows.values()))
    totals = _totals(benchmark, {CUT: len(cut)} | {name: len(group) for name, group in rows.items()})
    if not any(rows.values()):
        raise InputError(
            f"GuideLLM cut all {totals[CUT]:,} requests of benchmark {number} at its own limit, so none can be judged; "
            "let it run for longer"
        )
    share = min((len(rows[name]) / totals[name] for name in JUDGED if totals[name]), default=1.0)
    made = sum(totals[name] for name in JUDGED)
    kept = [row for name, group in rows.items() for row in _thinned(group, round(share * totals[name]))]
    return Imported(
        tool=TOOL, version=word(inner(document, "metadata", "guidellm_version")),
        name=f"guidellm-{word(inner(strategy, 'type_')) or 'benchmark'}-{number}",
        model=_of_backend(document, benchmark, "model"), base_url=_of_backend(document, benchmark, "target"),
        rows=sorted(kept, key=lambda row: row.due_ns), unseen=UNSEEN, arrivals=_arrivals(strategy), is_unix_time=True,
        objectives=_objectives(benchmark), kept_share=len(kept) / made if made else 1.0,
        notes=[*([f"{outside:,} requests of the warm-up or cool-down are left out"] if outside else []),
               *_sample(totals, rows, kept), *cut_by_the_tool(TOOL, totals[CUT], _waiting(cut))],
    )  # fmt: skip


def _groups(benchmark: Any, number: int) -> dict[str, list[Json]]:
    """The requests by how they ended."""
    groups = inner(benchmark, "requests")
    found = {name: groups.get(name) or [] for name in (*JUDGED, CUT)} if isinstance(groups, dict) else {}
    if not any(found.values()):
        raise InputError(f"benchmark {number} of the report lists no request; write it with all requests")
    return found


def _rows(benchmark: Any, strategy: Any, groups: dict[str, list[Json]]) -> dict[str, list[ClientRecord]]:
    """The measured ones of each group."""
    entries = {name: [each for each in group if _is_measured(benchmark, each)] for name, group in groups.items()}
    is_closed = _is_closed(strategy, [entry for group in entries.values() for entry in group])
    return {name: [_row(entry, JUDGED[name], is_closed) for entry in group] for name, group in entries.items()}


def _objectives(benchmark: Any) -> list[Json]:
    slo = {ours: inner(benchmark, "config", "slo", name) for name, ours in SLOS.items()}
    bounds = {name: bound for name, bound in slo.items() if isinstance(bound, int | float) and bound > 0}
    return [{"klass": "all", "source": "the result file", **bounds}] if bounds else []


def _of_backend(document: Json, benchmark: Any, name: str) -> str | None:
    """The model or the target, wherever a version writes it."""
    backends = (inner(document, "config", "spec", "backend"), inner(benchmark, "config", "backend"),
                inner(document, "args"), inner(benchmark, "worker"))  # fmt: skip
    places = (inner(each, key) for each in backends for key in (name, f"backend_{name}"))
    return next((found for place in places if (found := word(place))), None)


def _is_measured(benchmark: Any, entry: Json) -> bool:
    """Whether a request was in flight between warm-up and cool-down, as GuideLLM's own figures have it."""
    begin, end = (ns(inner(benchmark, "scheduler_metrics", f"measure_{name}_time")) or 0 for name in ("start", "end"))
    stamps = _stamps(entry)
    return not ((0 < (stamps["end"] or begin) < begin) or (0 < end < (stamps["sent"] or 0)))


def _totals(benchmark: Any, listed: dict[str, int]) -> dict[str, int]:
    """How many requests of each group were made: a report may list a sample of them."""
    places = (inner(benchmark, "metrics", "request_totals"), inner(benchmark, "request_totals"),
              inner(benchmark, "scheduler_metrics", "requests_made"))  # fmt: skip
    told = next((each for each in places if isinstance(each, dict)), {})
    return {name: max(number, count(told.get(name)) or 0) for name, number in listed.items()}


def _sample(totals: dict[str, int], rows: dict[str, list[ClientRecord]], kept: list[ClientRecord]) -> list[str]:
    """A sentence where the report lists a sample. GuideLLM draws each group by itself, so the larger shares are thinned
    out: else failures would weigh too much."""
    made = sum(totals[name] for name in JUDGED)
    if sum(map(len, rows.values())) == made:
        return []
    listed = " and ".join(f"{len(rows[name]):,} of {totals[name]:,} {name}" for name in JUDGED if totals[name])
    return [
        f"a sample: {made:,} requests were made, and the report lists {listed}. {len(kept):,} are kept, of each in "
        f"proportion: shares and latencies are of those, rates are scaled to {made:,}"
    ]


def _thinned(rows: list[ClientRecord], number: int) -> list[ClientRecord]:
    """So many of the rows, evenly over time."""
    ordered = sorted(rows, key=lambda row: row.due_ns)
    return [ordered[place * len(ordered) // number] for place in range(number)] if number < len(rows) else ordered


def _is_closed(strategy: Any, entries: list[Any]) -> bool:
    """Whether the server decides when requests are sent: by the strategy, or by a start that all of them share."""
    kind = inner(strategy, "type_")
    if kind in CLOSED or kind in OPEN:
        return kind in CLOSED
    starts = {_stamps(entry)["due"] for entry in entries}
    return len(starts) == 1 < len(entries)


def _waiting(entries: list[Any]) -> list[int]:
    found = [_stamps(entry) for entry in entries]
    return [
        each["end"] - each["sent"] for each in found if None not in (each["sent"], each["end"]) and not each["first"]
    ]


def _arrivals(strategy: Any) -> Json:
    kind, streams, rate = (inner(strategy, name) for name in ("type_", "streams", "rate"))
    if kind in CLOSED:
        limit = 1 if kind == "synchronous" else streams or inner(strategy, "max_concurrency")
        return {"process": "concurrency", "in_flight": limit} if limit else {"process": "at_once"}
    return {"process": OPEN.get(kind, "times"), "rate_rps": rate}


def _stamps(entry: Json) -> dict[str, int | None]:
    """Nanoseconds; 0.3 writes -1 where there is none."""
    sources = (inner(entry, "info", "timings"), inner(entry, "scheduler_info"), entry)
    return {
        ours: next(
            (stamp for each in sources for name in names if (stamp := ns(inner(each, name))) and stamp > 0), None
        )
        for ours, names in STAMPS.items()
    }


def _row(entry: Json, status: str, is_closed: bool) -> ClientRecord:
    stamps = _stamps(entry)
    sent = stamps["sent"]
    due = (None if is_closed else stamps["due"]) or sent or stamps["due"] or stamps["queued"]
    need_times(TOOL, 0, targeted_start=due)
    error = word(inner(entry, "info", "error")) or word(entry.get("error"))
    prompt, output = (
        count(entry.get(name)) if entry.get(name) is not None else count(inner(entry, metrics, "text_tokens"))
        for name, metrics in (("prompt_tokens", "input_metrics"), ("output_tokens", "output_metrics"))
    )
    return ClientRecord(
        request_id=str(entry.get("request_id")), scenario="", due_ns=due, sent_ns=sent,
        first_token_ns=stamps["first"], last_token_ns=stamps["last"],
        last_byte_ns=stamps["end"] if sent is not None else None, status=status,
        error=error or (None if status == "ok" else status),
        session_id=word(inner(entry, "info", "conversation_id")) or "",
        turn=count(inner(entry, "info", "turn_index")) or 0,
        prompt_tokens=prompt, output_tokens=output, cached_tokens=count(entry.get("cached_tokens")),
    )  # fmt: skip
