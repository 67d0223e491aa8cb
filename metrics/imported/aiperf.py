"""AIPerf's records of requests, `profile_export.jsonl`, as 0.13 writes them: one request a line.

Stamps are nanoseconds of the wall clock; each metric has its unit. Requests of the warm-up are left out.
"""

from itertools import accumulate
from typing import Any

from metrics.errors import InputError
from metrics.imported.result import Imported, Json, count, inner, need_times, word
from metrics.records import ClientRecord

TOOL = "AIPerf"
NS = {"ns": 1.0, "us": 1e3, "ms": 1e6, "sec": 1e9, "s": 1e9}
UNSEEN = [
    "the model, the rate and the objectives: they are in profile_export_aiperf.json",
    "tokens in each chunk: a chunk stands for a token in the times between tokens",
    "tenants and classes",
]


def recognises(document: Any) -> bool:
    metadata = inner(document, "metadata")
    return isinstance(metadata, dict) and "request_start_ns" in metadata and isinstance(document.get("metrics"), dict)


def read_lines(lines: list[Json]) -> list[Imported]:
    """Raises InputError where no request was measured."""
    kept = [entry for entry in lines if inner(entry, "metadata", "benchmark_phase") != "warmup"]
    if not kept:
        raise InputError("the file holds no request that was measured: all are of the warm-up")
    rows = sorted((_row(entry, number) for number, entry in enumerate(kept)), key=lambda row: row.due_ns)
    unseen = list(UNSEEN)
    if any(entry["metadata"].get("credit_issued_ns") is None for entry in kept):
        unseen.append("the intended send of some requests: their actual send stands for it")
    return [Imported(tool=TOOL, version=None, name="aiperf", model=None, rows=rows, unseen=unseen, arrivals={},
                     is_unix_time=True)]  # fmt: skip


def _ns(metric: Any) -> float | None:
    """A metric of time in nanoseconds; None where it is absent or in a unit that is none of time."""
    scale, value = NS.get(str(inner(metric, "unit"))), inner(metric, "value")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value * scale if is_number and scale is not None else None


def _row(entry: Json, number: int) -> ClientRecord:
    facts, metrics = entry["metadata"], entry["metrics"]
    sent, end = count(facts.get("request_start_ns")), count(facts.get("request_end_ns"))
    need_times(TOOL, number, request_start_ns=sent)
    ttft = _ns(metrics.get("time_to_first_token"))
    first = round(sent + ttft) if ttft is not None else None
    between = metrics.get("inter_chunk_latency")
    gaps, scale = inner(between, "value"), NS.get(str(inner(between, "unit")))
    known = first is not None and isinstance(gaps, list) and scale is not None
    failed = isinstance(entry.get("error"), dict)
    cancelled = bool(facts.get("was_cancelled"))
    values = {name: inner(metrics, name, "value") for name in (
        "usage_prompt_tokens", "input_sequence_length", "usage_completion_tokens", "output_sequence_length",
        "usage_prompt_cache_read_tokens",
    )}  # fmt: skip
    prompt, output = (
        count(values[server]) if count(values[server]) is not None else count(values[client])
        for server, client in (
            ("usage_prompt_tokens", "input_sequence_length"), ("usage_completion_tokens", "output_sequence_length"),
        )
    )  # fmt: skip
    return ClientRecord(
        request_id=word(facts.get("x_request_id")) or f"aiperf-{number:06d}", scenario="",
        due_ns=count(facts.get("credit_issued_ns")) or sent, sent_ns=sent, first_token_ns=first, last_byte_ns=end,
        status="cancelled" if cancelled else "error" if failed else "ok",
        error=(word(inner(entry, "error", "message")) or "failed") if failed else None,
        session_id=word(facts.get("conversation_id")) or "", turn=count(facts.get("turn_index")) or 0,
        prompt_tokens=prompt, output_tokens=output, cached_tokens=count(values["usage_prompt_cache_read_tokens"]),
        chunk_ns=[round(stamp) for stamp in accumulate((gap * scale for gap in gaps), initial=first)] if known else [],
    )  # fmt: skip
