"""The socket loop: sends each request at its due time and stamps the bytes of the reply, without parsing them.

It runs in a native thread with sockets from below gevent, so that Locust's greenlets delay no read for long. Of a reply
it only detects the end of the HTTP message (httptools: 0.1 µs a read).
"""

import heapq
import os
import select
import ssl
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from time import monotonic_ns

from gevent.monkey import get_original

from sojourn.loadgen.client.arrival_stamps import KernelClock
from sojourn.loadgen.client.connection import Connection, Exchange, HttpEnd
from sojourn.loadgen.client.event_log import (
    BYTES,
    CANCELLED,
    CLOSED,
    DISPATCHED,
    DUE,
    ERROR,
    NO_REQUEST,
    RECONNECTED,
    REDIRECTED,
    SENT,
    STOPPED_SENDING,
    EventLog,
)
from sojourn.loadgen.client.outgoing import STOPPED, Ended, Outgoing

SPIN_NS = 1_000_000  # epoll sleeps whole milliseconds; the rest is spent in turns without a sleep
READS_A_TURN = 64  # between two checks for due requests: some 0.4 ms
IDLE_NS = 500_000_000
PIPE_BYTES = 65_536
READABLE, WRITABLE = select.POLLIN, select.POLLOUT  # epoll's have the same values

OnEnded = Callable[[Outgoing, Ended], None]


class SocketLoop:
    """Owns the sockets, the due requests and the current log.

    `on_ended` runs in the loop's thread after each request. It may call `at`, as closed loops and conversations do.
    `origin`: scheme, host and port, within which redirects are followed. The request that would be one more than
    `most_open` in flight is not sent, and none after it; nor is any after `most_failed` failures.
    """

    def __init__(
        self, address: tuple[int, tuple], tls: tuple[ssl.SSLContext, str] | None, on_ended: OnEnded, *,
        origin: str = "", reuse: bool = False, most_open: int | None = None, most_failed: int | None = None,
        on_turn: Callable[[int], None] = lambda _: None,
    ):  # fmt: skip
        self.log = EventLog()
        self._origin = origin
        self._address, self._tls, self._on_ended, self._reuse, self._on_turn = address, tls, on_ended, reuse, on_turn
        self._due: list[tuple[int, int, Outgoing]] = []
        self._deadlines: list[tuple[int, int, Exchange]] = []
        self._order = count()  # requests of one due time are sent in the order of `at`
        self._connections: dict[int, Connection] = {}
        self._idle: deque[Connection] = deque()
        self._most_open, self._most_failed = most_open, most_failed
        self._num_failed = 0
        self.num_started = 0
        self._num_open = 0
        self._clock = KernelClock()
        self._stopping = False
        self._drain_for = ""  # why nothing more is sent
        self._last_due_ns: int | None = None  # once draining: what was due later is not sent
        self._poller = _Poller()
        self._wake_out, self._wake_in = os.pipe()
        self._poller.register(self._wake_out, READABLE)
        self._posted: deque[Outgoing | int] = deque()  # by other threads: what to send, and the index of what to cancel

    def at(self, outgoing: Outgoing) -> None:
        """Sends a request at its `due_ns`, or at once if that has passed. In the loop's thread, or before it runs."""
        if self._last_due_ns is not None and outgoing.due_ns > self._last_due_ns:
            return
        heapq.heappush(self._due, (outgoing.due_ns, next(self._order), outgoing))

    def post(self, outgoing: Outgoing) -> None:
        """From any thread: sends a request at its `due_ns`, or at once if that has passed."""
        self._posted.append(outgoing)
        os.write(self._wake_in, b"x")

    def cancel(self, index: int) -> None:
        """From any thread: ends the request of this index, if it is due or in flight. One that was never sent leaves no
        event."""
        self._posted.append(index)
        os.write(self._wake_in, b"x")

    def stop(self) -> None:
        """From any thread: cancels requests in flight, and lets `run` return."""
        self._stopping = True
        os.write(self._wake_in, b"x")

    def drain(self, reason: str) -> None:
        """From any thread: sends nothing that is due later, and lets `run` return once all replies have ended."""
        if not self._drain_for:
            self._drain_for = reason
            os.write(self._wake_in, b"x")

    def run(self, arrivals: Iterable[Outgoing] = (), *, stays: bool = False) -> None:
        """Returns once no request is due or in flight, or after `stop`; with `stays` only then. May be called again.

        `arrivals` are in order of their due times. Each is built when the one before it starts, so that a million of
        them cost no time before the first.
        """
        due, deadlines, connections = self._due, self._deadlines, self._connections
        arrivals = iter(arrivals)
        upcoming = self._take_up(arrivals)
        while not self._stopping and (due or self._num_open or stays):
            now_ns = monotonic_ns()
            if self._drain_for and self._last_due_ns is None:
                self._forget_later(now_ns)
            if due and due[0][0] <= now_ns:
                upcoming = self._start_due(upcoming, arrivals)
                now_ns = monotonic_ns()
            while deadlines and deadlines[0][0] <= now_ns:
                self._look_at_deadline(heapq.heappop(deadlines)[2], now_ns)
            next_ns = min(due[0][0] if due else now_ns + IDLE_NS, deadlines[0][0] if deadlines else now_ns + IDLE_NS)
            ready = self._poller.wait(next_ns - monotonic_ns())
            self._clock.compare()
            for descriptor, mask in ready:
                connection = connections.get(descriptor)
                if connection is not None:
                    self._serve(connection, mask)
                elif descriptor == self._wake_out:
                    self._take_posted()
            self._on_turn(monotonic_ns())
        self._cancel_all()  # what is open or due here is so because of `stop`

    def _serve(self, connection: Connection, mask: int) -> None:
        """The socket of this connection is ready."""
        if connection.exchange is None:
            self._idle.remove(connection)
            self._drop(connection)
            return
        if mask & WRITABLE or not connection.ready:
            self._advance(connection)
        if mask & ~WRITABLE and connection.ready and connection.exchange is not None:
            self._read(connection)

    def _take_posted(self) -> None:
        os.read(self._wake_out, PIPE_BYTES)
        while self._posted:
            posted = self._posted.popleft()
            if isinstance(posted, Outgoing):
                self.at(posted)
                continue
            for outgoing in [each[2] for each in self._due if each[2].index == posted]:
                self._due[:] = [each for each in self._due if each[2] is not outgoing]
                heapq.heapify(self._due)
                self._never_sent(outgoing)
            for connection in list(self._connections.values()):
                if connection.exchange is not None and connection.exchange.outgoing.index == posted:
                    self._end(connection.exchange, CANCELLED, STOPPED)

    def _never_sent(self, outgoing: Outgoing) -> None:
        now_ns = monotonic_ns()
        self._on_ended(outgoing, Ended(now_ns, now_ns, 0, STOPPED))

    def _forget_later(self, last_due_ns: int) -> None:
        """Sending stops: requests that are due later are never sent."""
        self._last_due_ns = last_due_ns
        self.log.add(NO_REQUEST, last_due_ns, STOPPED_SENDING, self._drain_for.encode())
        self._due[:] = [each for each in self._due if each[0] <= last_due_ns]
        heapq.heapify(self._due)

    def _cancel_all(self) -> None:
        for connection in list(self._connections.values()):
            if connection.exchange is not None:
                self._end(connection.exchange, CANCELLED, STOPPED)
        self._due.clear()

    def close(self) -> None:
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._idle.clear()
        self._poller.close()
        os.close(self._wake_in)
        os.close(self._wake_out)

    def _take_up(self, arrivals: Iterator[Outgoing]) -> Outgoing | None:
        outgoing = next(arrivals, None)
        if outgoing is not None:
            self.at(outgoing)
        return outgoing

    def _start_due(self, upcoming: Outgoing | None, arrivals: Iterator[Outgoing]) -> Outgoing | None:
        """Starts all that is due. Returns the arrival that waits for its time then."""
        while self._due and self._due[0][0] <= monotonic_ns():
            if self._most_open is not None and self._num_open >= self._most_open and self._last_due_ns is None:
                self._drain_for = f"{self._num_open} requests were in flight, the most that were to be"
                self._forget_later(self._due[0][0] - 1)
                continue
            outgoing = heapq.heappop(self._due)[2]
            if outgoing is upcoming:
                upcoming = self._take_up(arrivals)
            self._start_request(outgoing)
        return upcoming

    def _start_request(self, outgoing: Outgoing) -> None:
        exchange = Exchange(outgoing, monotonic_ns())
        if outgoing.logs_due:
            self.log.add(outgoing.index, outgoing.due_ns, DUE)
        self.log.add(outgoing.index, exchange.dispatched_ns, DISPATCHED)
        self._num_open += 1
        self.num_started += 1
        try:
            self._take_connection(exchange)
        except OSError as error:
            self._end(exchange, ERROR, f"{type(error).__name__}: {error}")
            return
        self._watch_deadline(exchange)
        self._advance(exchange.connection)

    def _take_connection(self, exchange: Exchange) -> None:
        """An idle connection that is still open, else a new one. A stale one is logged: nothing was sent on it."""
        while self._idle:
            connection = self._idle.popleft()
            if not connection.stale():
                connection.take(exchange)
                return
            self._drop(connection)
            self.log.add(exchange.outgoing.index, monotonic_ns(), RECONNECTED, b"a kept connection was closed")
        connection = Connection(self._address, self._tls)
        self._connections[connection.descriptor] = connection
        connection.take(exchange)
        connection.watched = connection.wants
        self._poller.register(connection.descriptor, connection.watched)

    def _advance(self, connection: Connection) -> None:
        """Connects, performs the TLS handshake and sends, as far as the socket allows."""
        exchange = connection.exchange
        try:
            if connection.connect():
                if exchange.unsent:
                    if exchange.sent_ns is None:
                        exchange.sent_ns = monotonic_ns()
                        self.log.add(exchange.outgoing.index, exchange.sent_ns, SENT)
                    wire, exchange.unsent = exchange.unsent, b""
                    connection.write(wire)
                    if exchange.outgoing.target.first_byte_timeout_s is not None:
                        self._watch_deadline(exchange)
                else:
                    connection.flush()
        except OSError as error:
            self._end(exchange, ERROR, f"{type(error).__name__}: {error}")
            return
        if connection.wants != connection.watched:
            connection.watched = connection.wants
            self._poller.modify(connection.descriptor, connection.watched)

    def _read(self, connection: Connection) -> None:
        exchange, complete = connection.exchange, False
        try:
            raw, ancillary = connection.receive()
            now_ns = self._clock.stamp(ancillary)
            data = connection.decrypt(raw)
            if data:
                self.log.add(exchange.outgoing.index, now_ns, BYTES, data)
                complete = exchange.feed(data, now_ns)
        except BlockingIOError:
            return
        except (OSError, *HttpEnd.FAULTS) as error:
            self._end(exchange, ERROR, f"{type(error).__name__}: {error}")
            return
        if data and exchange.first_read and exchange.outgoing.target.gap_timeout_s is not None:
            self._watch_deadline(exchange)
        if complete:
            keeps_alive = self._reuse and exchange.keeps_alive
            if path := exchange.redirect(self._origin):
                self.log.add(exchange.outgoing.index, now_ns, REDIRECTED, path)
                self._send_again(exchange, keeps_alive)
                return
        if complete or not raw:
            status = exchange.status
            self._end(exchange, CLOSED, "no reply" if not status else "" if status == 200 else f"HTTP {status}")

    def _send_again(self, exchange: Exchange, keeps_alive: bool) -> None:
        """After a redirect: on its connection, or on another one where the server closes it."""
        if not keeps_alive:
            connection = exchange.connection
            connection.exchange = exchange.connection = None
            self._drop(connection)
            try:
                self._take_connection(exchange)
            except OSError as error:
                self._end(exchange, ERROR, f"{type(error).__name__}: {error}")
                return
        self._advance(exchange.connection)

    def _watch_deadline(self, exchange: Exchange) -> None:
        heapq.heappush(self._deadlines, (exchange.deadline()[0], next(self._order), exchange))

    def _look_at_deadline(self, exchange: Exchange, now_ns: int) -> None:
        """Ends a request after its deadline. A request that made progress gets its new deadline."""
        if exchange.connection is None:
            return
        deadline_ns, kind, reason = exchange.deadline()
        if deadline_ns <= now_ns:
            self._end(exchange, kind, reason)
        else:
            self._watch_deadline(exchange)

    def _end(self, exchange: Exchange, kind: int, reason: str) -> None:
        """Ends a request: its terminal event, its connection, and the call of `on_ended`."""
        connection, outgoing = exchange.connection, exchange.outgoing
        ended_ns = monotonic_ns()
        self.log.add(outgoing.index, ended_ns, kind, b"" if kind == CLOSED else reason.encode())
        self._num_open -= 1
        if self._most_failed is not None and self._last_due_ns is None:
            self._count_failure(reason or exchange.fault(), exchange.last_ns or ended_ns)
        exchange.connection = None
        if connection is not None:
            connection.exchange = None
            if kind == CLOSED and self._reuse and exchange.keeps_alive:
                self._idle.append(connection)
            else:
                self._drop(connection)
        last_ns = exchange.last_ns or ended_ns
        reads = tuple(exchange.reads)
        self._on_ended(outgoing, Ended(ended_ns, last_ns, exchange.num_bytes, reason, reads, exchange.sent_ns, kind))

    def _count_failure(self, fault: str, ended_ns: int) -> None:
        """`ended_ns`: from then on a request may be due that follows this one."""
        self._num_failed += bool(fault)
        if self._num_failed == self._most_failed:
            self._drain_for = f"{self._num_failed} of {self.num_started} requests failed: {fault}"
            self._forget_later(min(ended_ns, self._due[0][0] if self._due else ended_ns) - 1)

    def _drop(self, connection: Connection) -> None:
        del self._connections[connection.descriptor]
        self._poller.unregister(connection.descriptor)
        connection.close()


class _Poller:
    """epoll, or poll where it is absent."""

    def __init__(self) -> None:
        # Locust has gevent take both out of the module `select`.
        self._is_epoll = hasattr(select, "EPOLLIN")
        self._poll = get_original("select", "epoll")() if self._is_epoll else get_original("select", "poll")()
        self.register, self.unregister, self.modify = self._poll.register, self._poll.unregister, self._poll.modify

    def wait(self, wait_ns: int) -> list[tuple[int, int]]:
        wait_ms = max(wait_ns - SPIN_NS, 0) // 1_000_000
        return self._poll.poll(wait_ms / 1e3, READS_A_TURN) if self._is_epoll else self._poll.poll(wait_ms)

    def close(self) -> None:
        if self._is_epoll:
            self._poll.close()
