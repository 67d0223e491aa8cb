"""Reads KV events from the ZeroMQ sockets of live servers. It sends nothing but questions for missed messages.

A message that is not three frames, a number of 8 bytes among them, is counted and dropped. None of more than
MOST_MESSAGE_BYTES is read, and nothing is unpickled. A server that is gone is connected to again when it is back.
"""

import socket
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import zmq

from sojourn.live.kv_lens.sequence import MessageSequence
from sojourn.metrics.errors import InputError, ServerError
from sojourn.metrics.records import KvEventRecord

MOST_MESSAGE_BYTES = 64 << 20
WAITING_MESSAGES = 100_000  # in the socket, before it drops
ANSWER_SECONDS = 5.0  # between two parts of an answer; then it is given up
LOOK_SECONDS = 2.0  # that an address may take to answer
GREETING = b"\xff"  # the first byte of every ZeroMQ peer (ZMTP 3)
SENT_AT_ONCE = 1_000  # messages of one socket, before the others are read
END = (-1).to_bytes(8, "big", signed=True)


class KvEndpoint(msgspec.Struct, frozen=True):
    """Where one server publishes its KV events."""

    events: str  # of its PUB socket
    replay: str | None = None  # of its ROUTER socket, which answers for missed messages
    topic: str = ""
    pool_blocks: int | None = None  # as the server says

    def name(self) -> str:
        return self.events.partition("://")[2]


def check_endpoint(address: str, what: str = "KV events") -> None:
    """Raises InputError for what is no address, and ServerError where nobody there speaks ZeroMQ."""
    kind, separator, place = address.partition("://")
    if kind not in ("tcp", "ipc") or not separator or not place or "*" in place:
        raise InputError(
            f"{address!r} is no address of {what}; give one to connect to, such as tcp://127.0.0.1:5557 or "
            "ipc:///path (a server's tcp://*:5557 is tcp://HOST:5557 from here)"
        )
    if kind == "ipc":
        path = Path(place)
        if not path.exists() or not stat.S_ISSOCK(path.stat().st_mode):
            raise ServerError(f"no server publishes {what} at {address}: {path} is no socket")
        return
    parts = urlsplit(address)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InputError(f"{address!r} is no address: {error}; give one such as tcp://127.0.0.1:5557") from None
    if not host or not port:
        raise InputError(f"{address!r} has no host or no port; give one such as tcp://127.0.0.1:5557")
    try:
        with socket.create_connection((host, port), LOOK_SECONDS) as connection:
            connection.settimeout(LOOK_SECONDS)
            first = connection.recv(1)
    except TimeoutError:
        first = b""
    except OSError as error:
        raise ServerError(
            f"no server publishes {what} at {address} ({error.strerror or error}); a vLLM server does with "
            "--kv-events-config, an SGLang server too, and ours with --kv-events"
        ) from None
    if first != GREETING:
        raise ServerError(
            f"what listens at {address} does not speak ZeroMQ: give the address of {what}, not that of the HTTP server"
        )


class EventReader:
    """Owns the sockets and a thread. Events reach `sink` in order, in that thread."""

    def __init__(self, endpoints: Sequence[KvEndpoint], sink: Callable[[list[KvEventRecord]], None]):
        """Connects. Raises InputError and ServerError for addresses that are not there."""
        for endpoint in endpoints:
            check_endpoint(endpoint.events)
            if endpoint.replay is not None:
                check_endpoint(endpoint.replay, "replays")
        self.wall_anchor = {"monotonic_ns": time.monotonic_ns(), "unix_ns": time.time_ns()}
        self.failed = ""  # why the thread ended by itself
        self._sink = sink
        self._context = zmq.Context()
        self._publishers = [self._connected(endpoint) for endpoint in endpoints]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv events", daemon=True)

    @property
    def sequences(self) -> dict[str, MessageSequence]:
        return {each.name: each.sequence for each in self._publishers}

    def start(self) -> "EventReader":
        self._thread.start()
        return self

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(10)
        self._context.destroy(linger=0)

    def _connected(self, endpoint: KvEndpoint) -> "_Publisher":
        subscriber = self._context.socket(zmq.SUB)
        subscriber.set_hwm(WAITING_MESSAGES)
        asking = None
        for each in (subscriber, *([asking := self._context.socket(zmq.DEALER)] if endpoint.replay else [])):
            each.setsockopt(zmq.MAXMSGSIZE, MOST_MESSAGE_BYTES)
            each.setsockopt(zmq.IPV6, 1)
        subscriber.setsockopt(zmq.SUBSCRIBE, endpoint.topic.encode())
        subscriber.connect(endpoint.events)
        if asking is not None:
            asking.set_hwm(WAITING_MESSAGES)
            asking.connect(endpoint.replay)
        sequence = MessageSequence(endpoint.name(), self._to_ns, can_ask=asking is not None)
        return _Publisher(endpoint.name(), subscriber, asking, sequence)

    def _to_ns(self, seconds: float) -> int:
        return self.wall_anchor["monotonic_ns"] + int(seconds * 1e9) - self.wall_anchor["unix_ns"]

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in self._publishers:
            poller.register(each.subscriber, zmq.POLLIN)
            if each.asking is not None:
                poller.register(each.asking, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                ready = {found for found, _ in poller.poll(200)}
                for each in self._publishers:
                    if events := [*each.ask(), *each.read(ready)]:
                        self._sink(events)
        except Exception as error:
            self.failed = f"reading KV events ended: {error!r}"
            raise


class _Publisher:
    """The sockets of one server."""

    def __init__(self, name: str, subscriber: zmq.Socket, asking: zmq.Socket | None, sequence: MessageSequence):
        self.name, self.subscriber, self.asking, self.sequence = name, subscriber, asking, sequence
        self._answer_ns = 0  # when its last part came

    def ask(self) -> list[KvEventRecord]:
        """Sends the question that is due; gives an answer up that does not come."""
        sequence, now_ns = self.sequence, time.monotonic_ns()
        if sequence.ask_from is not None and self.asking is not None:
            with suppress(zmq.Again):
                number = sequence.ask_from.to_bytes(8, "big")
                self.asking.send_multipart((b"", number), zmq.DONTWAIT)
                sequence.ask_from, self._answer_ns = None, now_ns
        if sequence.is_asking and sequence.ask_from is None and now_ns - self._answer_ns > ANSWER_SECONDS * 1e9:
            return sequence.answered(now_ns, in_time=False)
        return []

    def read(self, ready: set[zmq.Socket]) -> list[KvEventRecord]:
        found: list[KvEventRecord] = []
        if self.asking in ready:
            for frames in _messages(self.asking):
                found += self._answer(frames)
        if self.subscriber in ready:
            for frames in _messages(self.subscriber):
                if len(frames) == 3 and len(frames[1]) == 8:
                    found += self.sequence.message(int.from_bytes(frames[1], "big"), frames[2], time.monotonic_ns())
                else:
                    self.sequence.malformed_message(f"a message of {len(frames)} frames is no message of KV events")
        return found

    def _answer(self, frames: list[bytes]) -> list[KvEventRecord]:
        """An empty frame, perhaps the topic, the number, the batch; the last one has the number -1."""
        self._answer_ns = now_ns = time.monotonic_ns()
        if len(frames) not in (3, 4) or frames[0] or len(frames[-2]) != 8:
            self.sequence.malformed_message(f"an answer of {len(frames)} frames is no message of KV events")
            return []
        if frames[-2] == END:
            return self.sequence.answered(now_ns)
        return self.sequence.answer(int.from_bytes(frames[-2], "big"), frames[-1], now_ns)


def _messages(source: zmq.Socket):
    """What has come, up to a bound."""
    with suppress(zmq.Again):
        for _ in range(SENT_AT_ONCE):
            yield source.recv_multipart(zmq.DONTWAIT)
