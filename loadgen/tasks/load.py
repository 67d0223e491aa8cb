"""Sends the requests of tasks, one at a time for each user, with the socket loop and the records of a replay.

A task decides what is sent when, so nothing is built beforehand: the schedule grows while it is sent.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent
import gevent.event
from greenlet import GreenletExit

from sojourn.loadgen.client import event_log
from sojourn.loadgen.client.dispatcher import first_that_connects
from sojourn.loadgen.client.event_writer import EventWriter
from sojourn.loadgen.client.outgoing import STOPPED, Ended, Outgoing
from sojourn.loadgen.client.socket_loop import SocketLoop
from sojourn.loadgen.prompts.bodies import http_bytes, json_bytes
from sojourn.loadgen.record.parse import Event, client_record
from sojourn.loadgen.scenario.scenario import Target
from sojourn.loadgen.schedule.request import ScheduledRequest, save_segment
from sojourn.loadgen.target.endpoint import Endpoint
from sojourn.metrics.records import ClientRecord

CANCEL_S = 5.0  # that the socket loop has to end one request
TOKENS_PER_WORD = 1.3  # of English, within 15 %


@dataclass(frozen=True, slots=True)
class Part:
    """What a process sends for: as the master's message has it."""

    run_dir: str
    scenario: str  # the name
    id_prefix: str
    first_index: int
    stride: int  # between two of its indexes: other processes have those between
    start_ns: int  # on the master's clock


@dataclass(frozen=True, slots=True)
class Wanted:
    """One request of a task."""

    klass: str
    tenant: str
    session_id: str
    body: Mapping[str, Any]
    max_tokens: int
    target: Target
    endpoint: Endpoint
    late_ns: int  # for how long this process kept the user from asking
    pause_ns: int  # that the user waited since the last answer


class Cut(GreenletExit):
    """The user was killed while its request was in flight."""

    def __init__(self, record: ClientRecord, ended: Ended):
        super().__init__()
        self.record, self.ended = record, ended


class TaskLoad:
    """Owns the socket loop of a process, and what it sent and has not written yet."""

    def __init__(self, part: Part, endpoint: Endpoint, reuse: bool, shift_ns: int = 0):
        self.part = part
        self._num_asked = self.num_recorded = 0  # one that STOP cut off before it was sent has no record
        self.run_dir = Path(part.run_dir)
        self._waiting: dict[int, gevent.event.AsyncResult] = {}
        self._wanted: dict[int, Outgoing] = {}
        self._planned: deque[ScheduledRequest] = deque()
        self._ended: deque[tuple[int, Ended]] = deque()
        self._closing = gevent.event.Event()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._writer = EventWriter(self.run_dir, shift_ns, before=self._write_plan)
        tls = (endpoint.tls(), endpoint.host) if endpoint.scheme == "https" else None
        self._loop = SocketLoop(
            first_that_connects(endpoint), tls, self._took_end, origin=endpoint.origin, reuse=reuse,
            on_turn=lambda now_ns: self._writer.swap(self._loop, now_ns),
        )  # fmt: skip
        self._loop.log.add(event_log.NO_REQUEST, part.start_ns - shift_ns, event_log.STARTED)
        event_log.warm_up()
        self._hub_watcher = gevent.get_hub().loop.async_()  # the one thing that another thread may call
        self._hub_watcher.start(self._hand_over)
        self._sending = gevent.get_hub().threadpool.spawn(lambda: self._loop.run(stays=True))
        self._writing = gevent.spawn(self._writer.write_until, self._closing)

    def send(self, wanted: Wanted, drain_s: Callable[[], float]) -> tuple[ClientRecord, Ended]:
        """Sends a request now and returns once it has ended. A greenlet that is killed meanwhile waits `drain_s()` for
        the end, cancels the request after that or at a second kill, and raises `Cut`."""
        index = self.part.first_index + self._num_asked * self.part.stride
        self._num_asked += 1
        request = self._request(index, wanted)
        wire = http_bytes(wanted.endpoint, wanted.target, request, json_bytes(wanted.body))
        due_ns = time.monotonic_ns() - wanted.late_ns
        result = self._waiting[index] = gevent.event.AsyncResult()
        self._planned.append(request)
        outgoing = self._wanted[index] = Outgoing(index, due_ns, wire, wanted.target, keep_reply=True, logs_due=True)
        self._loop.post(outgoing)
        was_cut = False
        try:
            ended = result.get()
        except GreenletExit:
            was_cut, ended = True, self._drained(index, result, drain_s())
        record = client_record(request, self.part.scenario, due_ns, _events(index, ended))[0]
        if was_cut:
            raise Cut(record, ended)
        return record, ended

    def _drained(self, index: int, result: gevent.event.AsyncResult, drain_s: float) -> Ended:
        try:
            return result.get(timeout=max(0.0, drain_s))
        except (gevent.Timeout, GreenletExit):
            self._loop.cancel(index)
            return result.get(timeout=CANCEL_S)

    def close(self) -> None:
        """Cancels what is in flight, and writes all stamps. Raises RunDataError if they cannot be written."""
        self._loop.stop()
        self._sending.get()
        for outgoing in list(self._wanted.values()):  # posted, and never sent
            now_ns = time.monotonic_ns()
            self._took_end(outgoing, Ended(now_ns, now_ns, 0, STOPPED))
        self._closing.set()
        self._writing.join()
        self._hand_over()
        self._hub_watcher.stop()
        self._loop.close()
        self._writer.write_the_rest(self._loop.log)

    def _request(self, index: int, wanted: Wanted) -> ScheduledRequest:
        body = wanted.body
        return ScheduledRequest(
            index=index, request_id=f"{self.part.id_prefix}-{index:06d}", due_offset_ns=None, klass=wanted.klass,
            tenant=wanted.tenant, session_id=wanted.session_id, turn=0, prompt_tokens=_estimated_tokens(body),
            max_tokens=wanted.max_tokens, shared_prefix=-1, shared_prefix_tokens=0,
            temperature=float(body.get("temperature", 1.0)), top_k=body.get("top_k"), top_p=body.get("top_p"),
            ignore_eos=bool(body.get("ignore_eos", False)), seed=int(body.get("seed", 0)), prelude=False,
            priority=int(body.get("priority", 0)), pause_ns=max(0, wanted.pause_ns),
        )  # fmt: skip

    def _took_end(self, outgoing: Outgoing, ended: Ended) -> None:
        """In the loop's thread."""
        self._wanted.pop(outgoing.index, None)
        self.num_recorded += ended.kind is not None
        self._ended.append((outgoing.index, ended))
        self._hub_watcher.send()

    def _hand_over(self) -> None:
        """In the hub: wakes the users whose requests have ended."""
        while self._ended:
            index, ended = self._ended.popleft()
            self._waiting.pop(index).set(ended)

    def _write_plan(self) -> None:
        """Before events are written: nobody could read those of an unknown request."""
        requests = [self._planned.popleft() for _ in range(len(self._planned))]
        if requests:
            name = f"{time.time_ns():020d}-{os.getpid()}"
            try:
                save_segment(self.run_dir, requests, self.part.scenario, name)
            except BaseException:
                self._planned.extendleft(reversed(requests))
                raise


def _events(index: int, ended: Ended) -> list[Event]:
    """The events of an ended request, as its log has them."""
    sent = [(index, ended.sent_ns, event_log.SENT, b"")] if ended.sent_ns is not None else []
    reads = [(index, ns, event_log.BYTES, data) for ns, data in ended.reads]
    kind = event_log.CANCELLED if ended.kind is None else ended.kind
    return [*sent, *reads, (index, ended.ended_ns, kind, b"" if kind == event_log.CLOSED else ended.reason.encode())]


def _estimated_tokens(body: Mapping[str, Any]) -> int:
    """Of the prompt, in words: the tables have the server's own count."""
    prompt = body.get("prompt")
    texts = [prompt] if prompt is not None else [message.get("content") for message in body["messages"]]
    return round(TOKENS_PER_WORD * sum(len(str(text).split()) for text in texts))
