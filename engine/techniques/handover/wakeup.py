"""Wakes a thread that waits for ZeroMQ sockets."""

import contextlib
import itertools

import zmq

_numbers = itertools.count()


class Wakeup:
    """One thread calls `ring`, and then `close`. Another one polls `socket`, calls `clear`, and closes it."""

    def __init__(self, context: zmq.Context):
        address = f"inproc://wakeup-{next(_numbers)}"
        self.socket = context.socket(zmq.PULL)
        self._bell = context.socket(zmq.PUSH)
        for end in (self.socket, self._bell):
            end.setsockopt(zmq.LINGER, 0)
        self.socket.bind(address)
        self._bell.connect(address)

    def ring(self) -> None:
        with contextlib.suppress(zmq.Again):  # so many rings wait that one more changes nothing
            self._bell.send(b"", zmq.DONTWAIT)

    def clear(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self.socket.recv(zmq.DONTWAIT)

    def close(self) -> None:
        """Nobody rings any more. The other thread may not hear the last ring."""
        self._bell.close()
