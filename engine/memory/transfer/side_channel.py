"""The side channel of a prefill server: it says how its slots are read, and takes back leases."""

import logging
import threading
from collections.abc import Callable

import zmq

from engine.memory.transfer import wire
from metrics.errors import ModelError

log = logging.getLogger(__name__)

CLOSE_S = 1.0
POLL_MS = 200


class SideChannel:
    """A thread that answers decode servers. It has no access control: it belongs in a trusted network."""

    def __init__(self, host: str, port: int, welcome: wire.Welcome, release: Callable[[str], bool]):
        """Raises ModelError where the address cannot be bound; port 0 takes a free one."""
        self._welcome = wire.encode(welcome)
        self._release = release
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_MESSAGE_BYTES)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1 if ":" in host else 0)
        try:
            self.port = _bound(self._socket, f"tcp://{f'[{host}]' if ':' in host else host}", port)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ModelError(
                f"kv_transfer_port={port} on {host} cannot be bound: {error.strerror}; choose another one"
            ) from None
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="kv-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closing = True
        self._thread.join(CLOSE_S)
        self._context.destroy(linger=0)

    def _serve(self) -> None:
        while not self._is_closing:
            try:
                if self._socket.poll(POLL_MS):
                    self._take(self._socket.recv_multipart())
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
        else:
            self._socket.send_multipart([frames[0], self._welcome], zmq.DONTWAIT)


def _bound(socket: zmq.Socket, address: str, port: int) -> int:
    if port:
        socket.bind(f"{address}:{port}")
        return port
    return socket.bind_to_random_port(address)
