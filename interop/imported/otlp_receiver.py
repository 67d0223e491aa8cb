"""A small OTLP/HTTP receiver: what servers post as traces becomes a file that `otlp_file.read_spans` reads.

It takes protobuf, plain or with gzip, and writes each message behind its length, as a collector's file exporter does.
"""

import http.server
import struct
import threading
import zlib
from pathlib import Path
from typing import BinaryIO

from sojourn.metrics.errors import ServerError

LARGEST_BODY = 64 << 20  # bytes, packed and unpacked
PATH = "/v1/traces"


class Receiver:
    """Owns the socket and the file. `messages` and `refused` count posts."""

    def __init__(self, port: int, file: Path):
        """Listens on 127.0.0.1. Raises ServerError where the port is taken or the file cannot be written."""
        self.messages = self.refused = 0
        self._lock = threading.Lock()
        try:
            self._out: BinaryIO = file.open("ab")
        except OSError as error:
            raise ServerError(f"{file} cannot be written: {error.strerror}") from None
        try:
            self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        except OSError as error:
            self._out.close()
            raise ServerError(f"port {port} of 127.0.0.1 cannot be used ({error.strerror}); choose another") from None
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, name="otlp receiver", daemon=True).start()

    def take(self, body: bytes) -> None:
        with self._lock:
            self._out.write(struct.pack(">I", len(body)) + body)
            self._out.flush()
            self.messages += 1

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        with self._lock:
            self._out.close()


def _handler(receiver: Receiver) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, body = self._body()
            if status == 200:
                receiver.take(body)
            else:
                receiver.refused += 1
            self.send_response(status)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _body(self) -> tuple[int, bytes]:
            length = self.headers.get("Content-Length", "")
            if self.path != PATH:
                return 404, b""
            if not length.isdigit() or int(length) > LARGEST_BODY:
                return 413, b""
            if "protobuf" not in self.headers.get("Content-Type", ""):
                return 415, b""
            body = self.rfile.read(int(length))
            if self.headers.get("Content-Encoding") != "gzip":
                return 200, body
            try:
                stream = zlib.decompressobj(zlib.MAX_WBITS | 16)
                unpacked = stream.decompress(body, LARGEST_BODY + 1)
            except zlib.error:
                return 400, b""
            if len(unpacked) > LARGEST_BODY:
                return 413, b""
            is_whole = stream.eof and not stream.unused_data  # a second member would be left out
            return (200, unpacked) if is_whole else (400, b"")

        def log_message(self, *_: object) -> None:
            """Silent: the counts tell."""

    return Handler
