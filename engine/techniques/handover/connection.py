"""The connection of a decode server to one prefill server: where its side channel is, and what its slots are."""

import http.client
import json
import math
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from sojourn.engine.techniques.handover import wire
from sojourn.engine.techniques.handover.transport import KVTransport, PeerSlots, TransferError

ANSWER_MS = 2000
MAX_ANSWER_BYTES = 1 << 16  # of /query


@dataclass(frozen=True, slots=True)
class Model:
    """What has to be equal on both sides."""

    fingerprint: bytes
    facts: dict[str, str]  # settings that the fingerprint covers
    block_bytes: int


class Place(NamedTuple):
    """Where a prefill server is found: by its side channel, or by the HTTP server that answers /query."""

    host: str
    port: int
    by_query: bool = False

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}"


class Connection:
    """A socket to the side channel and the slots behind it, of one life of the prefill server. One thread uses it."""

    def __init__(
        self, place: Place, model: Model, transport: KVTransport, allowed: Callable[[str], bool], context: zmq.Context
    ):
        self._place, self._model, self._transport, self._allowed = place, model, transport, allowed
        self._context = context
        self.socket: zmq.Socket | None = None
        self.slots: PeerSlots | None = None
        self.engine_id = ""  # of the life that `slots` belong to
        self.inbox: deque[wire.Progress] = deque()  # that came while it was greeted

    def connect(self, engine_id: str | None = None) -> PeerSlots:
        """The slots of that life of the server; None takes the one that answers. Raises TransferError."""
        if self.slots is not None and engine_id in (None, self.engine_id):
            return self.slots
        self.disconnect()
        try:
            welcome = self._greet(self._open())
            self._check(welcome, engine_id)
            self.slots, self.engine_id = self._transport.connect(welcome.descriptor), welcome.engine_id
        except TransferError:
            self.disconnect()
            raise
        return self.slots

    def send(self, message: wire.ToPrefill) -> None:
        """Raises zmq.ZMQError, TransferError."""
        self._open().send(wire.encode(message), zmq.DONTWAIT)

    def receive(self) -> list[wire.Progress]:
        """What has come. A message of another form is dropped."""
        found = list(self.inbox)
        self.inbox.clear()
        while self.socket is not None and self.socket.poll(0):
            try:
                message = wire.decode_to_decode(self.socket.recv())
            except wire.UNREADABLE:
                continue
            if isinstance(message, wire.Progress):
                found.append(message)
        return found

    def disconnect(self) -> None:
        """Also forgets answers that came too late."""
        if self.slots is not None:
            self.slots.close()
        if self.socket is not None:
            self.socket.close()
        self.slots, self.socket, self.engine_id = None, None, ""
        self.inbox.clear()

    def _open(self) -> zmq.Socket:
        if self.socket is None:
            host, port = _side_channel(self._place, self._allowed) if self._place.by_query else self._place[:2]
            self.socket = self._context.socket(zmq.DEALER)
            self.socket.setsockopt(zmq.LINGER, 500)
            self.socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
            self.socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
            try:
                self.socket.connect(f"tcp://{f'[{host}]' if ':' in host else host}:{port}")
            except zmq.ZMQError as error:
                raise TransferError(f"{host}:{port} is no address of a side channel: {error.strerror}") from None
        return self.socket

    def _greet(self, channel: zmq.Socket) -> wire.Welcome:
        channel.send(wire.encode(wire.Hello(wire.VERSION)))
        until_s = time.monotonic() + ANSWER_MS / 1e3
        while channel.poll(max(0, math.ceil(1e3 * (until_s - time.monotonic())))):
            try:
                message = wire.decode_to_decode(channel.recv())
            except wire.UNREADABLE as error:
                raise TransferError(f"its answer is none of this protocol: {error}") from None
            if isinstance(message, wire.Welcome):
                return message
            self.inbox.append(message)
        raise TransferError(f"it gave no answer within {ANSWER_MS / 1e3:g} s")

    def _check(self, welcome: wire.Welcome, engine_id: str | None) -> None:
        """Raises TransferError unless its blocks are ours."""
        if welcome.version != wire.VERSION:
            versions = f"it speaks version {welcome.version} of the protocol, and this server version {wire.VERSION}"
            raise TransferError(f"{versions}; run one release on both", is_refusal=True)
        if engine_id not in (None, welcome.engine_id):
            raise TransferError("it was restarted since it computed the prompt")
        if welcome.transport != self._transport.name:
            both = f"its kv_transport is {welcome.transport}, and here it is {self._transport.name}"
            raise TransferError(f"{both}; set the same on both", is_refusal=True)
        if welcome.fingerprint != self._model.fingerprint:
            raise TransferError(_differences(welcome.facts, self._model.facts), is_refusal=True)


def _side_channel(place: Place, allowed: Callable[[str], bool]) -> tuple[str, int]:
    """Asks the HTTP server of a prefill server, as vLLM's decode servers do. Raises TransferError."""
    try:
        status, body = _answer_to_query(place)
        if status != 200:
            raise TransferError(f"its /query answers with status {status}; it has to be a prefill server")
        scheme, _, address = json.loads(body)["0"]["worker_addr"]["0"]["0"].partition("://")
        host, _, port = address.rpartition(":")
        host, number = host.strip("[]"), int(port)
    except (OSError, http.client.HTTPException) as error:
        raise TransferError(f"its /query gave no answer: {error or type(error).__name__}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise TransferError("its /query gives no address of a side channel") from None
    if scheme != "tcp" or not allowed(host):
        raise TransferError(
            f"its side channel is at {address[:80]}, where this server may not read; kv_peers lists the hosts that it "
            "may, and kv_transfer_host is the prefill server's address"
        )
    return host, number


def _answer_to_query(place: Place) -> tuple[int, bytes]:
    """Status and body, within ANSWER_MS however slowly they come. Raises OSError, HTTPException."""
    connection = http.client.HTTPConnection(place.host, place.port, timeout=ANSWER_MS / 1e3)
    try:
        connection.connect()
        hang_up = threading.Timer(ANSWER_MS / 1e3, connection.sock.shutdown, (socket.SHUT_RDWR,))
        hang_up.daemon = True
        hang_up.start()
        try:
            connection.request("GET", "/query")
            answer = connection.getresponse()
            return answer.status, answer.read(MAX_ANSWER_BYTES)
        finally:
            hang_up.cancel()
    finally:
        connection.close()


def _differences(theirs: dict[str, str], ours: dict[str, str]) -> str:
    """Why blocks of that server are of no use here."""
    names = [name for name in ours if theirs.get(name, ours[name]) != ours[name]]
    found = [f"{name} is {theirs[name][:80]} there and {ours[name]} here" for name in names]
    what = "; ".join(found) or "the weights, the number formats or the kernels differ"
    return f"its blocks are of no use here: {what}; start both servers with one model and the same settings"
