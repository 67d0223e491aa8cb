"""AIPerf's records of requests, `profile_export.jsonl`, as 0.1 of 2025 to 0.13 write them: one request a line.

Stamps are nanoseconds of the wall clock; each metric has its unit. Requests of the warm-up are left out, and those that
AIPerf cancelled itself. The first releases say `timestamp_ns`, `ttft` and `credit_phase`, and have no end.
"""

from itertools import accumulate
from typing import Any

from sojourn.interop.imported.result import Imported, Json, count, cut_by_the_tool, inner, need_times, number, word
from sojourn.metrics.errors import InputError
from sojourn.metrics.records import ClientRecord

TOOL = "AIPerf"
PHASES, WARMUP = ("benchmark_phase", "credit_phase"), "warmup"
NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "sec": 1e9, "s": 1e9}
UNSEEN = [
    "the model, the rate and the objectives: they are in profile_export_aiperf.json",
    "tokens in each chunk: a chunk stands for a token in the times between tokens",
    "tenants and classes",
]


def recognises(document: Any) -> bool:
    metadata = inner(document, "metadata")
    has_start = isinstance(metadata, dict) and bool({"request_start_ns", "timestamp_ns"} & set(metadata))
    return has_start and isinstance(document.get("metrics"), dict)


def read_lines(lines: list[Json]) -> list[Imported]:
    """Raises InputError where no request was measured."""
    kept = [entry for entry in lines if WARMUP not in (entry["metadata"].get(name) for name in PHASES)]
    if not kept:
        raise InputError("the file holds no request that was measured: all are of the warm-up")
    made = [(bool(entry["metadata"].get("was_cancelled")), _row(entry, place)) for place, entry in enumerate(kept)]
    cut = [row for is_cut, row in made if is_cut]
    rows = sorted((row for is_cut, row in made if not is_cut), key=lambda row: row.due_ns)
    if not rows:
        raise InputError(f"AIPerf cancelled all {len(cut):,} requests itself, so none can be judged; let it run longer")
    waiting = [row.last_byte_ns - row.sent_ns for row in cut if row.first_token_ns is None and row.last_byte_ns]
    notes = cut_by_the_tool(TOOL, len(cut), waiting)
    if warm := len(lines) - len(kept):
        notes.append(f"{warm:,} requests of the warm-up are left out")
    unseen = list(UNSEEN)
    if any(entry["metadata"].get("credit_issued_ns") is None for entry in kept):
        unseen.append("the intended send of some requests: their actual send stands for it")
    return [Imported(tool=TOOL, version=None, name="aiperf", model=None, rows=rows, unseen=unseen, arrivals={},
                     is_unix_time=True, notes=notes)]  # fmt: skip


def _ns(metric: Any) -> float | None:
    """A metric of time in nanoseconds; None where it is absent or in a unit that is none of time."""
    scale, value = NS.get(str(inner(metric, "unit"))), number(inner(metric, "value"))
    return value * scale if value is not None and scale is not None else None


def _row(entry: Json, place: int) -> ClientRecord:
    facts, metrics = entry["metadata"], entry["metrics"]
    sent, end = (count(facts.get(name)) for name in ("request_start_ns", "request_end_ns"))
    sent = count(facts.get("timestamp_ns")) if sent is None else sent
    need_times(TOOL, place, request_start_ns=sent)
    whole = _ns(metrics.get("request_latency"))
    end = round(sent + whole) if end is None and whole is not None else end
    ttft = _ns(metrics.get("time_to_first_token") or metrics.get("ttft"))
    first = round(sent + ttft) if ttft is not None else None
    failed = bool(entry.get("error"))
    return ClientRecord(
        request_id=word(facts.get("x_request_id")) or f"aiperf-{place:06d}", scenario="",
        due_ns=count(facts.get("credit_issued_ns")) or sent, sent_ns=sent, first_token_ns=first, last_byte_ns=end,
        status="error" if failed else "ok",
        error=(word(inner(entry, "error", "message")) or word(entry["error"]) or "failed") if failed else None,
        session_id=word(facts.get("conversation_id")) or "", turn=count(facts.get("turn_index")) or 0,
        prompt_tokens=_tokens(metrics, "usage_prompt_tokens", "input_sequence_length"),
        output_tokens=_tokens(metrics, "usage_completion_tokens", "output_sequence_length"),
        cached_tokens=_tokens(metrics, "usage_prompt_cache_read_tokens"), chunk_ns=_chunks(metrics, first),
    )  # fmt: skip


def _tokens(metrics: Json, *names: str) -> int | None:
    """The first of these counts that is there: the server's goes before the client's."""
    counts = (count(inner(metrics, name, "value")) for name in names)
    return next((found for found in counts if found is not None), None)


def _chunks(metrics: Json, first: int | None) -> list[int]:
    between = metrics.get("inter_chunk_latency")
    gaps, scale = inner(between, "value"), NS.get(str(inner(between, "unit")))
    if first is None or scale is None or not isinstance(gaps, list):
        return []
    return [round(stamp) for stamp in accumulate((gap * scale for gap in gaps), initial=first)]
