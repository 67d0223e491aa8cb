"""One prefill server, as a decode server reads it: a thread, a connection and its slots."""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import zmq

from engine.kv_source import KVSource
from engine.memory.tiers.store import Moved
from engine.memory.tiers.worker import Complaints, Worker
from engine.memory.transfer import wire
from engine.memory.transfer.headers import is_of
from engine.memory.transfer.transport import KVTransport, PeerSlots, TransferError

ANSWER_MS = 2000
RETRY_S = 10.0  # after a failure the peer is left alone
BATCH_BLOCKS = 16  # between two readings of their headers


@dataclass(frozen=True, slots=True)
class Model:
    """What has to be equal on both sides."""

    fingerprint: bytes
    facts: dict[str, str]  # settings that the fingerprint covers
    block_bytes: int


class Peer:
    """Reads the leases of one side channel in a thread of its own, so that a dead peer holds up its own only."""

    def __init__(
        self, host: str, port: int, model: Model, transport: KVTransport, finished: deque[Moved], context: zmq.Context
    ):
        """`finished` takes what was read, and what could not be read."""
        self.name = f"{host}:{port}"
        self._url = f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
        self._model, self._transport, self._finished = model, transport, finished
        self._context = context
        self._socket: zmq.Socket | None = None
        self._slots: PeerSlots | None = None
        self._engine_id = ""  # of the life that `_slots` belong to
        self._failure: tuple[str, float, TransferError] = "", 0.0, TransferError("")  # of which life, and when
        self._complaints = Complaints()
        self._is_closing = False
        self._worker = Worker(f"kv-peer-{port}")
        self.used_s = time.monotonic()

    def fetch(self, source: KVSource, reads: Sequence[tuple[bytes, int, int]]) -> None:
        """Reads blocks of a lease (key, the peer's slot, our slot), and gives the lease back."""
        self.used_s = time.monotonic()
        self._worker.submit(lambda: self._fetch(source, reads))

    def close(self, timeout_s: float = 0.0) -> None:
        """What is queued fails. Waits so long for what is under way."""
        self._is_closing = True
        self._worker.submit(self._disconnect)
        self._worker.close(timeout_s)

    def _fetch(self, source: KVSource, reads: Sequence[tuple[bytes, int, int]]) -> None:
        for begin in range(0, len(reads), BATCH_BLOCKS):
            batch = reads[begin : begin + BATCH_BLOCKS]
            began_ns, error, is_refusal, good = time.monotonic_ns(), "", False, [False] * len(batch)
            try:
                good = self._read(source.engine_id, batch)
                if not all(good):
                    error = "it does not hold them any more, or its prompt had other tokens"
            except TransferError as failure:
                error, is_refusal = str(failure), failure.is_refusal
            except Exception as failure:  # a read that never ended would hold its request for ever
                error = f"{type(failure).__name__}: {failure}"
            if error:
                error = f"the KV blocks of the prefill server {self.name} could not be read: {error}"
                self._complaints.log("read", "%s", error)
            ended_ns = time.monotonic_ns()
            share_ns = (ended_ns - began_ns) // len(batch)
            for index, ((key, _, _), ok) in enumerate(zip(batch, good, strict=True)):
                since_ns = began_ns + index * share_ns
                moved = Moved(key, True, ok, self._model.block_bytes, since_ns, since_ns + share_ns)
                self._finished.append(moved if ok else moved._replace(error=error, is_refusal=is_refusal))
        self._give_back(source)

    def _read(self, engine_id: str, batch: Sequence[tuple[bytes, int, int]]) -> list[bool]:
        """Which blocks were held all the time while they were read."""
        slots = self._connected(engine_id)
        remote = [theirs for _, theirs, _ in batch]
        before = slots.headers(remote)
        slots.read([(theirs, ours) for _, theirs, ours in batch])
        after = slots.headers(remote)
        return [
            header == again and is_of(header, self._model.fingerprint, key)
            for (key, _, _), header, again in zip(batch, before, after, strict=True)
        ]

    def _give_back(self, source: KVSource) -> None:
        """Not answered: a notice that is lost costs the peer its blocks until the lease expires."""
        try:
            if not self._has_failed(source.engine_id):
                self._open().send(wire.encode(wire.Release(source.lease_id)), zmq.DONTWAIT)
        except zmq.ZMQError:
            self._complaints.log("release", "a lease of the prefill server %s could not be given back", self.name)

    def _connected(self, engine_id: str) -> PeerSlots:
        """The slots of that life of the peer. Raises TransferError."""
        if self._is_closing:
            raise TransferError("this server ends")
        if self._slots is not None and self._engine_id == engine_id:
            return self._slots
        if self._has_failed(engine_id):
            raise self._failure[2]
        self._disconnect()
        try:
            self._slots = self._transport.connect(self._greet(engine_id).descriptor)
            self._engine_id = engine_id
        except TransferError as error:
            self._disconnect()
            self._failure = engine_id, time.monotonic(), error
            raise
        return self._slots

    def _has_failed(self, engine_id: str) -> bool:
        life, failed_s, _ = self._failure
        return life == engine_id and time.monotonic() - failed_s < RETRY_S

    def _greet(self, engine_id: str) -> wire.Welcome:
        channel = self._open()
        channel.send(wire.encode(wire.Hello(wire.VERSION, engine_id)))
        if not channel.poll(ANSWER_MS):
            raise TransferError(f"it gave no answer within {ANSWER_MS // 1000} s")
        try:
            welcome = wire.decode_welcome(channel.recv())
        except wire.UNREADABLE as error:
            raise TransferError(f"its answer is none of this protocol: {error}") from None
        self._check(welcome, engine_id)
        return welcome

    def _check(self, welcome: wire.Welcome, engine_id: str) -> None:
        """Raises TransferError unless its blocks are ours."""
        if welcome.version != wire.VERSION:
            versions = f"it speaks version {welcome.version} of the protocol, and this server version {wire.VERSION}"
            raise TransferError(f"{versions}; run one release on both", is_refusal=True)
        if welcome.engine_id != engine_id:
            raise TransferError("it was restarted since it computed the prompt")
        if welcome.transport != self._transport.name:
            both = f"its kv_transport is {welcome.transport}, and here it is {self._transport.name}"
            raise TransferError(f"{both}; set the same on both", is_refusal=True)
        if welcome.fingerprint != self._model.fingerprint:
            raise TransferError(_differences(welcome.facts, self._model.facts), is_refusal=True)

    def _open(self) -> zmq.Socket:
        if self._socket is None:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.setsockopt(zmq.LINGER, 500)
            self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
            self._socket.setsockopt(zmq.IPV6, 1 if "[" in self._url else 0)
            self._socket.connect(self._url)
        return self._socket

    def _disconnect(self) -> None:
        """Also forgets answers that came too late."""
        if self._slots is not None:
            self._slots.close()
        if self._socket is not None:
            self._socket.close()
        self._slots, self._socket, self._engine_id = None, None, ""


def _differences(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """Why blocks of that server are of no use here."""
    names = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
    found = [f"{name} is {theirs[name][:80]} there and {ours[name]} here" for name in names]
    what = "; ".join(found) or "the weights, the number formats or the kernels differ"
    return f"its blocks are of no use here: {what}; start both servers with one model and the same settings"
