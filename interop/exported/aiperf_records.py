"""A run as AIPerf's `profile_export.jsonl` (0.13): one request a line, with its metrics and their units.

Latencies run from the actual send, as there; `credit_issued_ns` is the intended send. What a run does not have is left
out: AIPerf's scripts read a metric only where it is. Stamps are of the wall clock, by the run's own anchor.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.request.latencies import inter_chunk_ms, with_origins
from sojourn.metrics.run.directory import section

WORKER = "sojourn"  # the file names the process that sent: a run does not


def aiperf_records(frame: pd.DataFrame, meta: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of the measured requests that were sent, in the order of the schedule. Raises RunDataError where the
    run has no anchor of the wall clock."""
    anchor = section(meta, "wall_anchor")
    if "unix_ns" not in anchor or "monotonic_ns" not in anchor:
        raise RunDataError("the run has no anchor of the wall clock, and AIPerf's stamps are of that clock")
    shift = int(anchor["unix_ns"]) - int(anchor["monotonic_ns"])
    rows = with_origins(frame.sort_values("due_ns", ignore_index=True))
    for number, row in enumerate(rows[rows.sent_ns.notna()].to_dict("records")):
        yield _line(number, row, shift)


def _line(number: int, row: Mapping[str, Any], shift: int) -> dict[str, Any]:
    end = row["last_byte_ns"] if pd.notna(row["last_byte_ns"]) else row["sent_ns"]
    metadata = {
        "session_num": number, "x_request_id": row["request_id"], "conversation_id": row["session_id"] or None,
        "turn_index": int(row["turn"]), "credit_issued_ns": int(row["due_ns"]) + shift,
        "request_start_ns": int(row["sent_ns"]) + shift, "request_end_ns": int(end) + shift, "worker_id": WORKER,
        "record_processor_id": WORKER, "benchmark_phase": "profiling", "was_cancelled": row["status"] == "cancelled",
    }  # fmt: skip
    line: dict[str, Any] = {"metadata": metadata, "metrics": dict(_metrics(row))}
    if row["status"] not in ("ok", "cancelled"):
        error = row["error"] if isinstance(row["error"], str) else row["status"]
        line["error"] = {"type": row["status"], "message": error}
    return line


def _metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each with its unit; only those that the run has."""
    chunks = row["chunk_ns"]
    for name, column in (
        ("time_to_first_token", "ttft_sent_ms"), ("request_latency", "e2e_sent_ms"), ("inter_token_latency", "tpot_ms"),
    ):  # fmt: skip
        if pd.notna(row[column]):
            yield name, {"value": float(row[column]), "unit": "ms"}
    if chunks is not None and len(chunks) > 1:
        yield "inter_chunk_latency", {"value": np.asarray(inter_chunk_ms(chunks)).tolist(), "unit": "ms"}
    for name, column in (
        ("usage_prompt_tokens", "prompt_tokens"), ("usage_completion_tokens", "output_tokens"),
        ("output_sequence_length", "output_tokens"), ("usage_prompt_cache_read_tokens", "cached_tokens"),
    ):  # fmt: skip
        if pd.notna(row[column]):
            yield name, {"value": int(row[column]), "unit": "tokens"}
