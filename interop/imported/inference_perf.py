"""inference-perf's `per_request_lifecycle_metrics.json`: a list of requests, with times in seconds of one clock.

`info` has the token counts itself (0.1 to 0.3), or below `request_metrics` and `response_metrics` (later).
"""

from typing import Any

from sojourn.interop.imported.result import Imported, Json, count, inner, need_times, ns, word
from sojourn.metrics.errors import InputError
from sojourn.metrics.records import ClientRecord

TOOL = "inference-perf"


def recognises(document: Any) -> bool:
    first = document[0] if isinstance(document, list) and document else None
    return isinstance(first, dict) and {"start_time", "end_time", "info"} <= set(first)


def read(document: list[Json]) -> list[Imported]:
    rows = [_row(entry, number) for number, entry in enumerate(document)]
    unseen = ["the model, the rate and the objectives: they are in the configuration of the run", "tenants and classes"]
    if not all("scheduled_time" in entry for entry in document):
        unseen.append("the intended send: latencies start at the actual send, so a late client is not seen")
    if not all(inner(entry, "info", "response_metrics", "server_usage") for entry in document):
        unseen.append("the server's own count of some tokens: the tool counted the text again")
    rows.sort(key=lambda row: row.due_ns)
    return [Imported(tool=TOOL, version=None, name=TOOL, model=None, rows=rows, unseen=unseen, arrivals={})]


def _row(entry: Json, number: int) -> ClientRecord:
    if not isinstance(entry, dict):
        raise InputError(f"entry {number} of the file is no object; the file is damaged")
    info = entry.get("info") if isinstance(entry.get("info"), dict) else {}
    reply = info.get("response_metrics") if isinstance(info.get("response_metrics"), dict) else info
    sent, end = ns(entry.get("start_time")), ns(entry.get("end_time"))
    need_times(TOOL, number, start_time=sent, end_time=end)
    tokens = [stamp for stamp in map(ns, reply.get("output_token_times") or []) if stamp is not None]
    usage = reply.get("server_usage")
    prompt = count(inner(info, "request_metrics", "text", "input_tokens"))
    error = entry.get("error")
    reason = word(inner(error, "error_msg")) or word(inner(error, "error_type")) or word(error)
    told = (count(inner(usage, name)) for name in ("prompt_tokens", "completion_tokens"))
    counted = (prompt if prompt is not None else count(info.get("input_tokens")), count(reply.get("output_tokens")))
    prompt_tokens, output_tokens = (a if a is not None else b for a, b in zip(told, counted, strict=True))
    return ClientRecord(
        request_id=f"inference-perf-{number:06d}", scenario="", due_ns=ns(entry.get("scheduled_time")) or sent,
        sent_ns=sent, first_token_ns=tokens[0] if tokens else None, last_byte_ns=end,
        status="error" if error else "ok", error=reason or ("failed" if error else None),
        session_id=word(entry.get("session_id")) or "", prompt_tokens=prompt_tokens, output_tokens=output_tokens,
        cached_tokens=count(inner(usage, "prompt_tokens_details", "cached_tokens")), chunk_ns=tokens,
    )  # fmt: skip
