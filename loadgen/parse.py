"""Raw events + schedule → `client.parquet`. Pure over what is on disk: the same after a run, and after a kill -9."""

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa

from loadgen.accuracy import with_calibration
from loadgen.outgoing import STOPPED
from loadgen.rawlog import (
    BYTES,
    CANCELLED,
    DISPATCHED,
    DUE,
    ERROR,
    NO_REQUEST,
    RAW_TABLE,
    RECONNECTED,
    SENT,
    STARTED,
    TERMINAL,
    TIMEOUT,
    abandoned,
    compact_events,
    discard_progress,
    event_files,
    read_events,
)  # fmt: skip
from loadgen.reply import Reply, ReplyReader
from loadgen.schedule import SCHEDULE_FILE, ScheduledRequest, read_schedule
from loadgen.shards import read_shards
from metrics.records import SCHEMAS, ClientRecord, row
from metrics.rundir import RunDirectory
from metrics.segments import discard_segments, replace_table

RAW_COLUMNS = ("index", "ns", "kind", "data")


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a run's raw events say."""

    records: list[ClientRecord]  # in order of the schedule
    started: bool  # whether the schedule began at all
    client_error: dict[str, float | None]
    num_never_due: int = 0  # of a closed loop: built, but no slot came to them


def recover(run_dir: Path | str) -> bool:
    """Builds the client table of a run whose processes were all killed. Returns whether there was anything to do.

    Cheap where there is not, and never in the way of a run under way: call it before reading any run.
    """
    run_dir = Path(run_dir)
    segments, schedule = run_dir / f"{RAW_TABLE}.parts", run_dir / SCHEDULE_FILE
    if not schedule.exists() or ((run_dir / "client.parquet").exists() and not segments.is_dir()):
        return False
    with abandoned(run_dir) as is_abandoned:
        if is_abandoned:
            parsed = build_client_table(run_dir)
            discard_progress(run_dir)
            client_error = with_calibration(parsed.client_error, parsed.records, read_shards(run_dir))
            RunDirectory(run_dir).update_meta(client_error=client_error)
    return is_abandoned


def build_client_table(run_dir: Path) -> Parsed:
    """Writes `client.parquet` from the schedule and the raw events, in place of what was parsed under way.

    Only once nobody writes events: makes one file of their segments too.
    """
    compact_events(run_dir)
    parsed = parse_run(run_dir)
    table = pa.Table.from_pylist([row(record) for record in parsed.records], schema=SCHEMAS["client"])
    replace_table(run_dir / "client.parquet", table)
    discard_segments(run_dir, "client")
    return parsed


def parse_run(run_dir: Path) -> Parsed:
    """Reads the schedule and the raw events. Requests without an end are `missing`, whatever came of them."""
    schedule, scenario = read_schedule(run_dir)
    by_request = events_by_request(event_files(run_dir))
    started = [ns for _, ns, kind, _ in by_request.get(NO_REQUEST, ()) if kind == STARTED]
    due_ns = _due_times(schedule, started[0] if started else None, by_request)
    records = [
        client_record(request, scenario, due_ns[request.index], by_request.get(request.index, []))
        for request in schedule
        if request.index in due_ns
    ]
    never_due = len(schedule) - len(records)
    return Parsed(records, bool(started), _client_error(schedule, due_ns, by_request), never_due)


def events_by_request(files: list[Path]) -> dict[int, list[tuple[int, int, int, bytes]]]:
    """Index of a request → its events (index, ns, kind, data) in the order of stamping."""
    events = read_events(files)
    rows = zip(*(events.column(name).to_pylist() for name in RAW_COLUMNS), strict=True)
    return {index: list(group) for index, group in groupby(rows, key=itemgetter(0))}


def _due_times(schedule: list[ScheduledRequest], start_ns: int | None, by_request: dict[int, list]) -> dict[int, int]:
    """When each request was meant to be sent. One of a closed loop whose turn never came was not meant to be sent.

    Where the schedule never began, the first stamp of all stands for its start.
    """
    first_ns = min((events[0][1] for events in by_request.values()), default=0)
    start_ns = first_ns if start_ns is None else start_ns
    due_ns: dict[int, int] = {}
    before_ns = None  # when the turn before was due, in a session that an open loop began
    for request in schedule:
        moment = due_time(request, start_ns, by_request.get(request.index, []))
        if moment is None and request.prelude:
            moment = first_ns
        elif moment is None and request.turn:
            moment = before_ns
        before_ns = moment if request.due_offset_ns is not None or (request.turn and before_ns is not None) else None
        if moment is not None:
            due_ns[request.index] = moment
    return due_ns


def due_time(request: ScheduledRequest, start_ns: int | None, events: list[tuple[int, int, int, bytes]]) -> int | None:
    """When a request was meant to be sent: at its moment of the schedule, or when what it hung on was over.

    One of the prelude was due when its turn came. None for what has no moment, and nothing that was stamped tells one.
    """
    if request.prelude:
        return events[0][1] if events else None
    if request.due_offset_ns is not None:
        return start_ns + request.due_offset_ns
    return next((ns for _, ns, kind, _ in events if kind == DUE), None)


def client_record(
    request: ScheduledRequest, scenario: str, due_ns: int, events: list[tuple[int, int, int, bytes]]
) -> ClientRecord:
    """What the events of a request say of it."""
    reader = ReplyReader()
    sent_ns = last_byte_ns = None
    end, reason = None, ""
    for _, ns, kind, data in events:
        if kind == SENT:
            sent_ns = ns
        elif kind == BYTES:
            reader.feed(data, ns)
            last_byte_ns = ns
        elif kind in TERMINAL:
            end, reason = kind, data.decode("utf-8", "replace")
    reply = reader.end() if end is not None else reader.reply
    status, error = _status(reply, end, reason, last_byte_ns is not None)
    return ClientRecord(
        request_id=request.request_id, scenario=scenario, due_ns=due_ns, status=status,
        tenant=request.tenant, klass=request.klass, session_id=request.session_id, turn=request.turn, sent_ns=sent_ns,
        first_token_ns=reply.chunk_ns[0] if reply.chunk_ns else None, last_byte_ns=last_byte_ns, error=error,
        prompt_tokens=reply.prompt_tokens, output_tokens=reply.output_tokens, cached_tokens=reply.cached_tokens,
        chunk_ns=reply.chunk_ns, chunk_tokens=reply.chunk_tokens,
    )  # fmt: skip


def _status(reply: Reply, end: int | None, reason: str, answered: bool) -> tuple[str, str | None]:
    """One of CLIENT_STATUSES, and why. A whole answer counts whatever happened to the connection afterwards."""
    if reply.error:
        return "error", reply.error
    if reply.finished and (reply.complete or end is not None):
        return "ok", None
    if end == TIMEOUT:
        return "timeout", reason or "no complete reply within target.timeout_s"
    if end == CANCELLED:
        return "cancelled", reason or STOPPED
    if end == ERROR:
        return "error", reason
    if end is None:
        return "missing", "no end was recorded: never sent, or the load generator was killed"
    return "error", "the stream ended before its last event" if answered else "closed without a reply"


def _client_error(schedule: list[ScheduledRequest], due_ns: dict[int, int], by_request: dict[int, list]) -> dict:
    """How late the generator itself was. `lag_…` is due → sent, `dispatch_…` its part before the socket was opened.

    Where connections are reused, `stale_connections` counts those that the server had closed before they were wanted.
    """
    lag, dispatch = [], []
    stale = sum(event[2] == RECONNECTED for events in by_request.values() for event in events)
    for request in schedule:
        stamps = {kind: ns for _, ns, kind, _ in by_request.get(request.index, ()) if kind in (SENT, DISPATCHED)}
        if request.measured and SENT in stamps and request.index in due_ns:
            lag.append(stamps[SENT] - due_ns[request.index])
            dispatch.append(stamps[DISPATCHED] - due_ns[request.index])
    return (
        {f"lag_{name}_ms": value for name, value in _quantiles_ms(lag).items()}
        | {f"dispatch_{name}_ms": value for name, value in _quantiles_ms(dispatch).items()}
        | ({"stale_connections": stale} if stale else {})
    )


def _quantiles_ms(durations_ns: list[int]) -> dict[str, float | None]:
    if not durations_ns:
        return {"p50": None, "p99": None, "max": None}
    p50, p99 = np.quantile(durations_ns, [0.5, 0.99])
    return {name: round(value / 1e6, 4) for name, value in (("p50", p50), ("p99", p99), ("max", max(durations_ns)))}
