"""The dispatcher: sends every request of a schedule at its moment, whatever the server does meanwhile (open loop)."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns

import gevent
import gevent.event
from gevent import socket, ssl
from gevent.pool import Pool

from loadgen.endpoint import Endpoint, EndpointError
from loadgen.hotpath import send_request
from loadgen.rawlog import FLUSH_SECONDS, NO_REQUEST, STARTED, Event, write_events, write_progress
from loadgen.schedule import ScheduledRequest

SPIN_NS = 1_000_000  # timers of the event loop are right within a millisecond; the rest is waited for in turns
LEAD_NS = 200_000_000  # between the last reply of the prelude and the start of the schedule
CONNECT_TIMEOUT_S = 5.0

logger = logging.getLogger(__name__)

OnFinished = Callable[[ScheduledRequest, float, int, str], None]  # request, latency_ms from due, bytes, "" or why not


@dataclass(frozen=True, slots=True)
class Replay:
    """All that one run needs, made before it starts."""

    schedule: list[ScheduledRequest]
    wire: list[bytes]
    endpoint: Endpoint
    timeout_s: float
    run_dir: Path


class OpenLoopClient:
    """Owns the requests in flight and the events that wait to be written."""

    def __init__(self, replay: Replay, on_finished: OnFinished):
        self.run_dir = replay.run_dir
        self._replay = replay
        self._on_finished = on_finished
        self._events: list[Event] = []
        self._num_written = 0
        self._closing = gevent.event.Event()
        self._in_flight = Pool()  # unbounded: a full pool would make late arrivals look prompt
        self._counts = {"total": len(replay.schedule), "sent": 0, "finished": 0, "failed": 0}
        self._address = _first_that_connects(replay.endpoint)
        self._tls = (ssl.create_default_context(), replay.endpoint.host) if replay.endpoint.scheme == "https" else None

    def run(self) -> None:
        """Sends the prelude one by one, then replays the schedule and waits for the last reply.

        Whatever ends it, the requests in flight are cancelled and everything stamped so far is written.
        """
        prelude = [request for request in self._replay.schedule if request.prelude]
        rest = [request for request in self._replay.schedule if not request.prelude]
        gc.collect()
        gc.freeze()  # the prebuilt requests are not walked by a collection in the middle of the run
        flusher = gevent.spawn(self._flush_until_closing)
        try:
            for request in prelude:
                self._send(request, monotonic_ns())
            start_ns = monotonic_ns() + LEAD_NS
            self._events.append((NO_REQUEST, start_ns, STARTED, b""))
            for request in rest:
                due_ns = start_ns + request.due_offset_ns
                wait_until(due_ns)
                self._in_flight.spawn(self._send, request, due_ns)
            self._in_flight.join()
        finally:
            self._in_flight.kill()
            self._closing.set()
            flusher.join()
            self._flush()
            gc.unfreeze()

    def _send(self, request: ScheduledRequest, due_ns: int) -> None:
        replay = self._replay
        self._counts["sent"] += 1
        # A late request has used up part of its time: the timeout counts from when it was due.
        timeout_s = max(replay.timeout_s - (monotonic_ns() - due_ns) / 1e9, 0.001)
        ended_well, last_ns, num_bytes, reason = send_request(
            request.index, replay.wire[request.index], self._address, self._tls, timeout_s, self._events.append
        )
        self._counts["finished" if ended_well else "failed"] += 1
        self._on_finished(request, (last_ns - due_ns) / 1e6, num_bytes, reason)

    def _flush_until_closing(self) -> None:
        threadpool = gevent.get_hub().threadpool
        while not self._closing.wait(FLUSH_SECONDS):
            try:
                threadpool.apply(self._flush)
            except OSError as error:
                logger.warning("events stay in memory, as the run directory refuses them: %s", error)

    def _flush(self) -> None:
        """Writes what is pending as one segment. The list stays the same object: requests hold its `append`."""
        num_events = len(self._events)
        if num_events:
            write_events(self._replay.run_dir, self._events[:num_events], self._num_written)
            del self._events[:num_events]
            self._num_written += num_events
        write_progress(self._replay.run_dir, self._counts)


def wait_until(due_ns: int) -> None:
    """Returns at `due_ns` on the monotonic clock, or at once if it has passed. Other greenlets run meanwhile."""
    while (left_ns := due_ns - monotonic_ns()) > 0:
        gevent.sleep(max(left_ns - SPIN_NS, 0) / 1e9)


def _first_that_connects(endpoint: Endpoint) -> tuple[int, tuple]:
    """The first of the host's addresses that takes a connection: a name may stand for several."""
    refusals = []
    for family, address in endpoint.addresses():
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.settimeout(CONNECT_TIMEOUT_S)
            try:
                probe.connect(address)
                return family, address
            except OSError as error:
                refusals.append(f"{address[0]}: {error.strerror or error}")
    raise EndpointError(f"no server answers at {endpoint.url} ({'; '.join(refusals)})")
