"""A run as inference-perf's `per_request_lifecycle_metrics.json`: a list of requests, in seconds of the run's clock.

Prompts and answers are empty, because a run keeps no texts. Of several tokens in one read each has the read's time.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd


def inference_perf_requests(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The measured requests that were sent, in the order of the schedule."""
    rows = frame.sort_values("due_ns", ignore_index=True)
    return [_entry(row) for row in rows[rows.sent_ns.notna()].to_dict("records")]


def _entry(row: Mapping[str, Any]) -> dict[str, Any]:
    end = row["last_byte_ns"] if pd.notna(row["last_byte_ns"]) else row["sent_ns"]
    chunks, tokens = row["chunk_ns"], row["chunk_tokens"]
    stamps = np.asarray([] if chunks is None else chunks, dtype="float64") / 1e9
    if tokens is not None and len(tokens) == len(stamps):
        times = np.repeat(stamps, np.asarray(tokens, dtype="int64"))
    else:
        times = stamps
    prompt, output, cached = (
        int(row[name]) if pd.notna(row[name]) else None for name in ("prompt_tokens", "output_tokens", "cached_tokens")
    )
    usage = None
    if prompt is not None and output is not None:
        details = None if cached is None else {"cached_tokens": cached}
        usage = {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}
    failed = row["status"] != "ok"
    reason = row["error"] if isinstance(row["error"], str) else row["status"]
    return {
        "session_id": row["session_id"] or None,
        "scheduled_time": float(row["due_ns"]) / 1e9,
        "start_time": float(row["sent_ns"]) / 1e9,
        "end_time": float(end) / 1e9,
        "request": "",
        "response": "",
        "info": {
            "request_metrics": {"text": {"input_tokens": prompt or 0}},
            "response_metrics": {
                "output_tokens": output or 0, "server_usage": usage, "chunk_times": stamps.tolist(),
                "output_token_times": times.tolist(),
            },
            "input_tokens": prompt or 0,
        },
        "error": {"error_type": row["status"], "error_msg": reason} if failed else None,
    }  # fmt: skip
