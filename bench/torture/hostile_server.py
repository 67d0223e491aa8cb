"""Servers that break the protocol in one way each, for the load generator."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator

MODELS = json.dumps({"object": "list", "data": [{"id": "hostile", "object": "model"}]}).encode()
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
EVENT = b'data: {"id":"a","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
WAYS = ("resets", "never answers", "half an answer", "garbage", "garbage events", "vanishes")
VANISHES_AFTER_S = 1.5


class HostileServer:
    """Answers /v1/models as it should, and calls in one of WAYS."""

    def __init__(self, way: str):
        self.way = way
        self.calls = 0
        self._first_s: float | None = None
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=512)
        self._open: set[socket.socket] = set()
        self._ends = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def serve(self) -> None:
        while not self._ends:
            with contextlib.suppress(OSError):
                connection, _ = self._listener.accept()
                self._open.add(connection)
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._ends = True
        self._vanish()

    def _vanish(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        for connection in list(self._open):
            connection.close()

    def _answer(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            request = b""
            while b"\r\n\r\n" not in request:
                if not (part := connection.recv(65_536)):
                    return
                request += part
            if request.startswith(b"POST") and b"/completions" in request.split(b"\r\n")[0]:
                self.calls += 1
                self._first_s = self._first_s or time.monotonic()
                self._misbehave(connection)
            elif b"/v1/models" in request.split(b"\r\n")[0]:
                head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: "
                connection.sendall(head + b"%d\r\n\r\n" % len(MODELS) + MODELS)
            else:
                connection.sendall(b"HTTP/1.1 404 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        if self.way != "never answers" or not self._first_s:
            self._open.discard(connection)
            connection.close()

    def _misbehave(self, connection: socket.socket) -> None:
        if self.way == "resets":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif self.way == "half an answer":
            connection.sendall(HEAD + EVENT * 2)
        elif self.way == "garbage":
            connection.sendall(bytes(range(256)) * 4)
        elif self.way == "garbage events":
            connection.sendall(HEAD + b"data: {]\n\ndata: \xff\xfe\n\n\xff\n\n")
        elif self.way == "vanishes":
            if time.monotonic() - self._first_s > VANISHES_AFTER_S:
                self._ends = True
                self._vanish()
            else:
                connection.sendall(HEAD + EVENT * 3 + b"data: [DONE]\n\n")


@contextlib.contextmanager
def hostile(way: str) -> Iterator[HostileServer]:
    server = HostileServer(way)
    threading.Thread(target=server.serve, daemon=True).start()
    try:
        yield server
    finally:
        server.close()
