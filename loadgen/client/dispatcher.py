"""Sends every request of a schedule at its due time, whatever the server does (open loop). `pacing.py` decides the
rest: later turns of a session and the slots of a closed loop."""

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

import gevent
import gevent.event
from gevent import socket

from sojourn.loadgen.client import event_log
from sojourn.loadgen.client.event_writer import EventWriter
from sojourn.loadgen.client.outgoing import Ended, Outgoing
from sojourn.loadgen.client.pacing import Pacer, Wires
from sojourn.loadgen.client.socket_loop import SocketLoop
from sojourn.loadgen.scenario.arrivals import ClosedLoop
from sojourn.loadgen.scenario.scenario import Target
from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.loadgen.target.endpoint import Endpoint, EndpointError

LEAD_NS = 200_000_000  # between the last reply of the prelude and the start of the schedule
CONNECT_TIMEOUT_S = 5.0
SHOW_SECONDS = 0.2
SWITCH_S = 0.0005  # another thread of Python gives way to the socket loop after this long, not after 5 ms

OnFinished = Callable[[ScheduledRequest, float, int, str], None]  # request, latency_ms from due, bytes, "" or why not


@dataclass(frozen=True, slots=True)
class Replay:
    """Everything that one process needs, built before it starts."""

    schedule: Sequence[ScheduledRequest]  # its own part, in order
    wire: Wires
    endpoint: Endpoint
    target: Target
    run_dir: Path
    loop: ClosedLoop | None = None
    shard: int = 0
    shift_ns: int = 0  # to add to a stamp of this host for the clock of the run


class LoadClient:
    """Owns the socket loop of a replay, and the results that Locust has not shown yet."""

    def __init__(self, replay: Replay, on_finished: OnFinished):
        self.run_dir = replay.run_dir
        self._replay = replay
        self._on_finished = on_finished
        self._writer = EventWriter(replay.run_dir, replay.shift_ns, after=self._after_a_flush)
        self._ended: deque[tuple[int, int, Ended]] = deque()
        self._closing = gevent.event.Event()
        self._counts = {"total": len(replay.schedule), "sent": 0, "finished": 0, "failed": 0}
        self._requests = {request.index: request for request in replay.schedule}
        self._pacer = Pacer(
            replay.schedule, replay.wire, replay.target, replay.loop, self._cancel,
            ran_out=lambda free_ns: self._loop.log.add(event_log.NO_REQUEST, free_ns, event_log.RAN_OUT),
        )  # fmt: skip
        address = first_that_connects(replay.endpoint)
        tls = (replay.endpoint.tls(), replay.endpoint.host) if replay.endpoint.scheme == "https" else None
        reuse = replay.target.connections == "reuse"
        self._loop = SocketLoop(
            address,
            tls,
            self._took_end,
            origin=replay.endpoint.origin,
            reuse=reuse,
            most_open=replay.target.stop_at_in_flight,
            most_failed=replay.target.stop_at_failures,
            on_turn=lambda now_ns: self._writer.swap(self._loop, now_ns),
        )

    def run(self, agree_start: Callable[[], int] = lambda: monotonic_ns() + LEAD_NS) -> None:
        """Sends the prelude one by one, then replays the schedule and waits for the last reply.

        `agree_start` returns the start time of the schedule, once the prelude is over. Whatever ends the run, requests
        in flight are cancelled and all stamps are written. Raises RunDataError if they cannot be.
        """
        event_log.warm_up()
        beside = [gevent.spawn(self._writer.write_until, self._closing), gevent.spawn(self._show_until_closing)]
        try:
            with _undisturbed():
                for request in self._replay.schedule:
                    if request.prelude:
                        wire, target = self._replay.wire[request.index], self._replay.target
                        self._send_all([Outgoing(request.index, monotonic_ns(), wire, target)])
                start_ns = agree_start()
                self._loop.log.add(event_log.NO_REQUEST, start_ns, event_log.STARTED)
                self._send_all(self._pacer.begin(start_ns))
                self._counts["total"] = self._counts["finished"] + self._counts["failed"]  # slots may not need all
        finally:
            self._closing.set()
            gevent.joinall(beside)
            self._loop.close()
            self._show()
            self._writer.write_the_rest(self._loop.log)

    def _send_all(self, due: Iterable[Outgoing]) -> None:
        """Sends these and returns when all have ended. The loop runs in a native thread, beside the greenlets."""
        running = gevent.get_hub().threadpool.spawn(self._loop.run, due)
        try:
            running.get()
        except BaseException:  # killing the greenlet stops the loop
            self._loop.stop()
            while not running.ready():  # a second kill must not close the loop while its thread is in it
                with suppress(gevent.GreenletExit):
                    running.wait()
            raise

    def _took_end(self, outgoing: Outgoing, ended: Ended) -> None:
        """In the loop's thread."""
        self._counts["failed" if ended.reason else "finished"] += 1
        self._ended.append((outgoing.index, outgoing.due_ns, ended))
        for following in self._pacer.follow(outgoing, ended):
            self._loop.at(following)

    def _cancel(self, requests: list[ScheduledRequest], ended: Ended, reason: str) -> None:
        """In the loop's thread: records requests that will never be sent, as due at this moment."""
        for request in requests:
            self._counts["failed"] += 1
            self._loop.log.add(request.index, ended.ended_ns, event_log.DUE)
            self._loop.log.add(request.index, ended.ended_ns, event_log.CANCELLED, f"not sent: {reason}".encode())
            self._ended.append((request.index, ended.ended_ns, Ended(ended.ended_ns, ended.ended_ns, 0, reason)))

    def _show_until_closing(self) -> None:
        while not self._closing.wait(SHOW_SECONDS):
            self._show()

    def _show(self) -> None:
        while self._ended:
            index, due_ns, ended = self._ended.popleft()
            self._on_finished(self._requests[index], (ended.last_ns - due_ns) / 1e6, ended.num_bytes, ended.reason)

    def _after_a_flush(self) -> None:
        if reason := event_log.drain_reason(self.run_dir):
            self._loop.drain(reason)
        sent = self._loop.num_started
        event_log.write_progress(self._replay.run_dir, self._counts | {"sent": sent}, self._replay.shard)


@contextmanager
def _undisturbed():
    """No garbage collection walks the prebuilt requests, and no thread holds the interpreter for long."""
    before_s = sys.getswitchinterval()
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)
        gc.unfreeze()


def first_that_connects(endpoint: Endpoint) -> tuple[int, tuple]:
    """The first address of the host that accepts a connection: a name may stand for several."""
    try:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise EndpointError(f"{endpoint.url}: the host {endpoint.host!r} is not known ({error.strerror})") from None
    refusals = []
    for family, _, _, _, address in found:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_TIMEOUT_S)
            try:
                probe.connect(address)
                return family, address
            except OSError as error:
                refusals.append(f"{address[0]}: {error.strerror or error}")
    raise EndpointError(f"no server answers at {endpoint.url} ({'; '.join(refusals)})")
