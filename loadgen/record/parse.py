"""Raw events + schedule → `client.parquet`. A pure function of the files: the same after a run and after a kill -9."""

from array import array
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sojourn.loadgen.client import event_log
from sojourn.loadgen.client.outgoing import STOPPED
from sojourn.loadgen.record.reply_notes import ReplyNotes
from sojourn.loadgen.replies.reply import Reply, ReplyReader
from sojourn.loadgen.schedule.request import ScheduledRequest, compact_schedule, read_schedule, read_warmup_s
from sojourn.metrics.records import NO_END, ClientRecord
from sojourn.metrics.records.tables import SCHEMAS, row
from sojourn.metrics.request.goodput import after_warmup
from sojourn.metrics.run.segments import discard_segments, replace_in_pieces

RAW_COLUMNS = ("index", "ns", "kind", "data")
EVENTS_AT_ONCE = 8192  # as Python objects: some 500 bytes each
RECORDS_AT_ONCE = 1024

NOT_SENT = -1

Event = tuple[int, int, int, bytes]  # index, ns, kind, data


@dataclass(frozen=True, slots=True)
class Parsed:
    """Totals of a run's raw events."""

    started: bool  # whether the schedule began at all
    num_records: int
    num_unfinished: int  # never sent, or without a recorded end
    num_never_due: int  # requests of a closed loop that no slot reached
    stopped: tuple[float, str] | None  # seconds of the schedule after which sending was stopped, and why
    ran_out: bool  # a slot of a closed loop was free, but no request was left
    client_error: dict[str, float | None]
    streams: np.ndarray  # [replies with text, 3]: ns of the first and of the last chunk, number of chunks
    sent: list[ScheduledRequest]  # in the order of sending
    measured: Container[int]  # indexes of the requests that count
    front: dict[str, Any] | None  # `replies.front.summary`
    notes: list[str]  # what the replies left open, or said of another load than was asked for

    def said(self) -> dict[str, Any]:
        """Of `run.json`: what the replies said."""
        return {"reply_notes": self.notes, **({"front": self.front} if self.front else {})}


class RunReader:
    """Reads a run's records one by one and accumulates their totals."""

    def __init__(self, run_dir: Path):
        self._schedule, self._scenario = read_schedule(run_dir)
        self._warmup_s = read_warmup_s(run_dir)
        self._files = event_log.event_files(run_dir)
        self._started = self._ran_out = False
        self._num_unfinished = self._num_stale = 0
        self._stopped: tuple[float, str] | None = None
        self._moments = array("q")  # of each record: index of its request, ns when it was due, dispatched, sent
        self._streams = array("q")
        self._notes = ReplyNotes()

    def records(self) -> Iterator[ClientRecord]:
        """In order of the schedule. A request without an end is `missing`. A request of a closed loop without a due
        time was not meant to be sent, and has no record. If the schedule never began, the first stamp stands for its
        start."""
        stream = events_by_request(self._files)
        upcoming, of_run = next(stream, None), []
        if upcoming is not None and upcoming[0] == event_log.NO_REQUEST:
            of_run, upcoming = upcoming[1], next(stream, None)
        start_ns, last_ns = self._read_course(of_run)
        before_ns = None  # when the turn before was due, in a session that an open loop began
        for request in self._schedule:
            events: list[Event] = []
            if upcoming is not None and upcoming[0] == request.index:
                events, upcoming = upcoming[1], next(stream, None)
            due_ns = due_time(request, start_ns, events)
            if due_ns is None and request.prelude:
                due_ns = start_ns
            elif due_ns is None and request.turn:
                due_ns = before_ns
            before_ns = (
                due_ns if request.due_offset_ns is not None or (request.turn and before_ns is not None) else None
            )
            never_sent = last_ns is not None and not events
            if due_ns is not None and not (never_sent and (request.turn or due_ns > last_ns)):
                record, reply = client_record(request, self._scenario, due_ns, events)
                self._count(request, record, events)
                self._notes.add(request, record, reply)
                yield record

    def _read_course(self, events: list[Event]) -> tuple[int, int | None]:
        """When the schedule began, and when sending was stopped before its end, by the events of no request."""
        start_ns = next((ns for _, ns, kind, _ in events if kind == event_log.STARTED), None)
        stops = [(ns, data) for _, ns, kind, data in events if kind == event_log.STOPPED_SENDING]
        self._ran_out = any(kind == event_log.RAN_OUT for _, _, kind, _ in events)
        self._started = start_ns is not None
        start_ns = event_log.first_stamp(self._files) if start_ns is None else start_ns
        last_ns = min((ns for ns, _ in stops), default=None)  # each process stops at a moment of its own
        if stops:
            self._stopped = max(0.0, (last_ns - start_ns) / 1e9), stops[0][1].decode()
        return start_ns, last_ns

    def parsed(self) -> Parsed:
        """The totals, once all records are read.

        `lag_…` is the delay of the generator itself, due → sent; `dispatch_…` is its part before the socket was opened;
        both of measured requests. With reused connections, `stale_connections` counts those that the server had closed.
        """
        index, due_ns, dispatched_ns, sent_ns = np.array(self._moments, dtype=np.int64).reshape(-1, 4).T
        planned = {request.index: request for request in self._schedule}
        counts = after_warmup(due_ns, self._warmup_s, sum(planned[each].prelude for each in index.tolist()))
        was_sent = sent_ns != NOT_SENT
        timed = counts & was_sent
        client_error = _quantiles_ms("lag", (sent_ns - due_ns)[timed])
        client_error |= _quantiles_ms("dispatch", (dispatched_ns - due_ns)[timed])
        if self._num_stale:
            client_error["stale_connections"] = self._num_stale
        in_order = index[was_sent][np.argsort(sent_ns[was_sent], kind="stable")]
        return Parsed(
            started=self._started, num_records=len(index), num_unfinished=self._num_unfinished,
            num_never_due=len(self._schedule) - len(index), stopped=self._stopped, ran_out=self._ran_out,
            client_error=client_error,
            streams=np.array(self._streams, dtype=np.int64).reshape(-1, 3),
            sent=[planned[each] for each in in_order.tolist()], measured=set(index[counts].tolist()),
            front=self._notes.front(), notes=self._notes.sentences(),
        )  # fmt: skip

    def _count(self, request: ScheduledRequest, record: ClientRecord, events: list[Event]) -> None:
        self._num_unfinished += record.status == "missing" or record.error == STOPPED
        self._num_stale += sum(kind == event_log.RECONNECTED for _, _, kind, _ in events)
        if record.chunk_ns:
            self._streams.extend((record.chunk_ns[0], record.chunk_ns[-1], len(record.chunk_ns)))
        stamps = {kind: ns for _, ns, kind, _ in events if kind in (event_log.SENT, event_log.DISPATCHED)}
        sent_ns = stamps.get(event_log.SENT, NOT_SENT)
        dispatched_ns = NOT_SENT if sent_ns == NOT_SENT else stamps[event_log.DISPATCHED]
        self._moments.extend((request.index, record.due_ns, dispatched_ns, sent_ns))


def read_records(run_dir: Path) -> list[ClientRecord]:
    """All records of a run that fits in memory."""
    return list(RunReader(run_dir).records())


def build_client_table(run_dir: Path) -> Parsed:
    """Writes `client.parquet` from the schedule and the raw events, in place of its segments. Call it once no process
    writes events: their segments become one file too."""
    event_log.compact_events(run_dir)
    compact_schedule(run_dir)
    run_reader = RunReader(run_dir)
    records = run_reader.records()
    pieces = iter(lambda: [row(record) for record in islice(records, RECORDS_AT_ONCE)], [])
    schema = SCHEMAS["client"]
    tables = (pa.Table.from_pylist(piece, schema=schema) for piece in pieces)
    replace_in_pieces(run_dir / "client.parquet", schema, tables)
    discard_segments(run_dir, "client")
    return run_reader.parsed()


def events_by_request(files: list[Path]) -> Iterator[tuple[int, list[Event]]]:
    """(index, events in the order of stamping) of each request that has any, in order of the index."""
    rows = (
        row
        for table in event_log.ordered_events(files)
        for batch in table.to_batches(max_chunksize=EVENTS_AT_ONCE)
        for row in zip(*(batch.column(name).to_pylist() for name in RAW_COLUMNS), strict=True)
    )
    for index, group in groupby(rows, key=itemgetter(0)):
        yield index, list(group)


def due_time(request: ScheduledRequest, start_ns: int | None, events: list[Event]) -> int | None:
    """When a request was due: at its time of the schedule, or at the DUE stamp if it depended on a reply. A prelude
    request was due at its first event. None if no stamp has the time."""
    if request.prelude:
        return events[0][1] if events else None
    if request.due_offset_ns is not None:
        return start_ns + request.due_offset_ns
    return next((ns for _, ns, kind, _ in events if kind == event_log.DUE), None)


def client_record(
    request: ScheduledRequest, scenario: str, due_ns: int, events: list[Event]
) -> tuple[ClientRecord, Reply]:
    reader = ReplyReader()
    sent_ns = last_byte_ns = None
    end, reason = None, ""
    for _, ns, kind, data in events:
        if kind == event_log.SENT:
            sent_ns = ns
        elif kind == event_log.BYTES:
            reader.feed(data, ns)
            last_byte_ns = ns
        elif kind == event_log.REDIRECTED:
            reader = ReplyReader()
        elif kind in event_log.TERMINAL:
            end, reason = kind, data.decode("utf-8", "replace")
    reply = reader.end() if end is not None else reader.reply
    status, error = _status(reply, end, reason, last_byte_ns is not None)
    tokens = reply.tokens
    record = ClientRecord(
        request_id=request.request_id, scenario=scenario, due_ns=due_ns, status=status,
        tenant=request.tenant, klass=request.klass, session_id=request.session_id, turn=request.turn, sent_ns=sent_ns,
        first_token_ns=reply.chunk_ns[0] if reply.chunk_ns else None, last_byte_ns=last_byte_ns, error=error,
        prompt_tokens=reply.prompt_tokens, output_tokens=tokens.total, cached_tokens=reply.cached_tokens,
        chunk_ns=reply.chunk_ns, chunk_tokens=tokens.of_chunks,
        first_answer_ns=reply.first_answer_ns,
    )  # fmt: skip
    return record, reply


def _status(reply: Reply, end: int | None, reason: str, answered: bool) -> tuple[str, str | None]:
    """One of CLIENT_STATUSES, and the reason. A complete answer counts, whatever happened to the connection
    afterwards."""
    if reply.error:
        return "error", reply.error
    if reply.finished and (reply.complete or end is not None):
        return "ok", None
    if end == event_log.TIMEOUT:
        return "timeout", reason or "no complete reply within target.timeout_s"
    if end == event_log.CANCELLED:
        return "cancelled", reason or STOPPED
    if end == event_log.ERROR:
        return "error", reason
    if end is None:
        return "missing", NO_END
    return "error", "the stream ended before its last event" if answered else "closed without a reply"


def _quantiles_ms(name: str, durations_ns: np.ndarray) -> dict[str, float | None]:
    shares = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        f"{name}_{label}_ms": round(np.quantile(durations_ns, share) / 1e6, 4) if len(durations_ns) else None
        for label, share in shares.items()
    }
