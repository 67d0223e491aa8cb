"""The side channel of a prefill server: how its slots are read, what may be read of a transfer, and leases back."""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from sojourn.engine.techniques.handover import wire
from sojourn.engine.techniques.handover.announcements import Announcements
from sojourn.engine.techniques.handover.wakeup import Wakeup
from sojourn.metrics.errors import ModelError

log = logging.getLogger(__name__)

CLOSE_S = 1.0
BEAT_S = 0.5  # between two words to a decode server that follows a transfer
UNKNOWN_S = 60.0  # a transfer whose call did not come in this time is followed no longer
MOST_FOLLOWERS = 1 << 14
SENT_AHEAD = 100_000  # messages for a decode server that is busy; it asks again where it misses those beyond


@dataclass(slots=True)
class _Follower:
    """A decode server that reads one transfer."""

    identity: bytes  # of its connection
    transfer_id: str
    since_s: float
    num_slots: int = 0  # that it knows


class SideChannel:
    """A thread that answers decode servers. It has no access control: it belongs in a trusted network."""

    def __init__(
        self, host: str, port: int, welcome: wire.Welcome, announcements: Announcements, release: Callable[[str], bool]
    ):
        """Raises ModelError where the address cannot be bound; port 0 takes a free one."""
        self._engine_id, self._welcome = welcome.engine_id, wire.encode(welcome)
        self._announcements, self._release = announcements, release
        self._followers: dict[str, list[_Follower]] = {}  # by transfer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.SNDHWM, SENT_AHEAD)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        try:
            self.port = _bound(self._socket, f"tcp://{f'[{host}]' if ':' in host else host}", port)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ModelError(
                f"kv_transfer_port={port} on {host} cannot be bound: {error.strerror}; choose another one"
            ) from None
        self._wakeup = Wakeup(self._context)
        announcements.on_change = self._wakeup.ring
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="kv-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._wakeup.ring()
        self._thread.join(CLOSE_S)
        self._announcements.on_change = lambda: None
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.socket, zmq.POLLIN)
        next_beat_s = time.monotonic() + BEAT_S
        while not self._is_closing:
            try:
                ready = dict(poller.poll(max(0, math.ceil(1e3 * (next_beat_s - time.monotonic())))))
                if self._wakeup.socket in ready:
                    self._wakeup.clear()
                if self._socket in ready:
                    self._take(self._socket.recv_multipart())
                for transfer_id in self._announcements.take_changed():
                    self._tell(transfer_id)
                if time.monotonic() >= next_beat_s:
                    next_beat_s = time.monotonic() + BEAT_S
                    for transfer_id in list(self._followers):
                        self._tell(transfer_id)
            except zmq.ZMQError:
                if not self._is_closing:
                    log.exception("the side channel of KV transfers failed; leases expire by themselves")
                return

    def _take(self, frames: list[bytes]) -> None:
        try:
            message = wire.decode_to_prefill(frames[-1])
        except wire.UNREADABLE:
            return  # of a stranger
        if isinstance(message, wire.Release):
            self._release(message.lease_id)
        elif isinstance(message, wire.Hello):
            self._socket.send_multipart([frames[0], self._welcome], zmq.DONTWAIT)
        elif sum(map(len, self._followers.values())) < MOST_FOLLOWERS:
            follower = _Follower(frames[0], message.transfer_id, time.monotonic())
            self._followers.setdefault(message.transfer_id, []).append(follower)
            self._tell(message.transfer_id)

    def _tell(self, transfer_id: str) -> None:
        """What each follower does not know yet; without news, that this server is alive."""
        staying = [each for each in self._followers.pop(transfer_id, ()) if self._goes_on(each)]
        if staying:
            self._followers[transfer_id] = staying

    def _goes_on(self, follower: _Follower) -> bool:
        """Tells one; False where that was the last word."""
        found = self._announcements.since(follower.transfer_id, follower.num_slots)
        if found is None:
            self._send(follower, wire.Progress(follower.transfer_id, self._engine_id, is_known=False))
            return time.monotonic() - follower.since_s < UNKNOWN_S
        for begin in range(0, max(1, len(found.slots)), wire.MOST_SLOTS):
            part = found.slots[begin : begin + wire.MOST_SLOTS]
            is_last = found.is_over and begin + wire.MOST_SLOTS >= len(found.slots)
            self._send(follower, wire.Progress(
                follower.transfer_id, self._engine_id, is_known=True, first=follower.num_slots, slots=part,
                is_over=is_last, lease_id=found.lease_id if is_last else "", error=found.error if is_last else "",
            ))  # fmt: skip
            follower.num_slots += len(part)
        return not found.is_over

    def _send(self, follower: _Follower, progress: wire.Progress) -> None:
        self._socket.send_multipart([follower.identity, wire.encode(progress)], zmq.DONTWAIT)


def _bound(socket: zmq.Socket, address: str, port: int) -> int:
    if port:
        socket.bind(f"{address}:{port}")
        return port
    return socket.bind_to_random_port(address)
