"""uvicorn's HTTP/1.1 on httptools, with bounds: on heads, on waiting for a client, and on connections."""

import asyncio
import contextlib
import fcntl
import sys
import termios
from collections.abc import Awaitable, Callable
from typing import Any

import httptools
import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.http.connections import Connections

MAX_PIPELINED = 16  # requests behind the one that is answered
LINGER_SECONDS = 2  # a client that still sends may read the refusal; closing at once would reset the connection
DISCARDED_BYTES = 262_144  # of a body that nobody reads, before the connection is given up

_BODY_FIELDS = (b"content-length", b"transfer-encoding")


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `uvicorn.Config(http=partial(BoundedProtocol, connections))`."""

    def __init__(self, connections: Connections, **uvicorn: Any):
        super().__init__(**uvicorn)
        self._connections = connections
        self._config = connections.config
        self._is_counted = False  # in the connections
        self._is_refused = False  # nothing that arrives is read any more
        self._lingers_until = 0.0
        self._idle_since = connections.clock()  # of a connection without a request
        self.has_head = False
        self._head_since = 0.0
        self._head_bytes = 0  # at least: without the part that it began in
        self._num_messages = 0
        self._in_message = False  # a head or its body arrives
        self._discarded_bytes = 0
        self._answered_at: float | None = None  # before its body was there
        self._unsent_bytes, self._unsent_since = 0, 0.0
        self._running: RequestResponseCycle | None = None  # `cycle` is the newest, which may wait in the pipeline

    # From the transport.

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._is_counted = self._connections.add(self)
        if not self._is_counted:
            message = "the server has no room for another connection; try again after the given time"
            self._refuse(ApiError(503, message, code="too_many_connections", retry_after_seconds=1))

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        most, begin = self._config.max_head_bytes, 0
        # A head is fed in parts, so that the parser never stores more of one header than a head may have.
        while begin < len(data) and not self._is_refused:
            in_body = self._in_message and not self.has_head
            part = data[begin:] if in_body else data[begin : begin + most + 1]
            was_head, num_messages = self.has_head, self._num_messages
            self._feed(part)
            begin += len(part)
            if was_head and self.has_head and num_messages == self._num_messages and not self._is_refused:
                self._head_bytes += len(part)
                if self._head_bytes > most:
                    self._refuse_head(f"more than max_head_bytes, {most} bytes")

    # From the parser.

    def on_message_begin(self) -> None:
        self._num_messages += 1
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self.has_head = self._in_message = True
        self._head_since = self._connections.clock()
        self._head_bytes = self._discarded_bytes = 0
        self._answered_at = None

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:  # a trailer behind a chunked body must not become a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_refused:
            return
        most_bytes, most_fields = self._config.max_head_bytes, self._config.max_header_fields
        request_line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n")
        size = request_line + sum(len(name) + len(value) + 4 for name, value in self.headers) + 2
        if size > most_bytes:
            return self._refuse_head(f"more than max_head_bytes, {most_bytes} bytes")
        if len(self.headers) > most_fields:
            return self._refuse_head(f"{len(self.headers)} fields, and max_header_fields is {most_fields}")
        if self.parser.should_upgrade() and any(name in _BODY_FIELDS for name, _ in self.headers):
            self._connections.count("bad_request")  # the parser takes the body for another protocol
            message = "this server speaks HTTP/1.1 only; send the request without the header Upgrade"
            return self._refuse(ApiError(400, message, code="upgrade_unsupported"))
        if len(self.pipeline) >= MAX_PIPELINED:
            self._connections.count("bad_request")
            message = f"more than {MAX_PIPELINED} requests wait on this connection for their turn; open another"
            return self._refuse(ApiError(400, message, code="too_many_pipelined"))
        self.has_head = False
        self._connections.begin_request(self)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._is_refused:
            return
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > DISCARDED_BYTES:
                self._linger("unread_body")
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        if not self._is_refused:
            super().on_message_complete()

    # From the application.

    def on_response_complete(self) -> None:
        self._idle_since = self._connections.clock()
        if self._in_message and not self.has_head:
            self._answered_at = self._idle_since
        if not self.pipeline:
            self._connections.end_request(self)
        super().on_response_complete()

    def timeout_keep_alive_handler(self) -> None:
        if not self.transport.is_closing():
            self._connections.count("idle")
        super().timeout_keep_alive_handler()

    # From the connections.

    def close_idle(self, reason: str) -> None:
        self._connections.count(reason)
        self.transport.close()

    def close_overdue(self, now: float) -> None:
        config, transport = self._config, self.transport
        if self._is_stalled(now):
            self._connections.count("stalled_reader")
            transport.abort()  # the application hears of a client that left
        elif transport.is_closing():
            return
        elif self._is_refused:
            if now > self._lingers_until:
                transport.close()
        elif self._answers():
            return  # its deadlines are those of the body, of the core and of the reader
        elif self.has_head:
            if now - max(self._head_since, self._idle_since) > config.head_seconds:
                self._connections.count("slow_head")
                message = f"the head did not arrive in head_seconds, {config.head_seconds:g} s; send it again"
                self._refuse(ApiError(408, message, code="head_timeout"))
        elif self._answered_at is not None and self._in_message:
            if now - self._answered_at > config.head_seconds:
                self._linger("unread_body")
        elif now - self._idle_since > config.keep_alive_seconds:
            self.close_idle("idle")

    def send_400_response(self, msg: str) -> None:
        """Where the parser gives up, or its callbacks do."""
        self._connections.count("bad_request")
        self._refuse(ApiError(400, "the request is not valid HTTP/1.1; the connection is closed", code="invalid_http"))

    # Its own.

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, _unchunked(app, cycle) if cycle.scope["http_version"] == "1.0" else app)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # the answer is the one of HTTP/1.1, and then the connection ends
            if self.cycle is not None:
                self.cycle.keep_alive = False
        except httptools.HttpParserError:
            if not self._is_refused:
                self.send_400_response("")

    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _is_stalled(self, now: float) -> bool:
        """The client has read nothing for too long. Judged only where nothing is written meanwhile."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or (self._answers() and not self.flow.write_paused and not self.transport.is_closing()):
            self._unsent_bytes = 0
        elif (unsent := unsent + _in_kernel(self.transport)) != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent, now
        return self._unsent_bytes > 0 and now - self._unsent_since > self._config.send_seconds

    def _refuse_head(self, what: str) -> None:
        self._connections.count("large_head")
        self._refuse(ApiError(431, f"the head of the request has {what}; send less", code="head_too_large"))

    def _refuse(self, error: ApiError) -> None:
        """Answers in place of the application. While an earlier request is answered, the connection only ends: its task
        may still write, which must not come behind the end of the stream."""
        if self._answers():
            self._is_refused = True
            self.pipeline.clear()
            self.transport.close()
            return
        if not self.transport.is_closing():
            body = msgspec.json.encode(error.body())
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n" % len(body)
            if error.retry_after_seconds is not None:
                head += b"retry-after: %d\r\n" % error.retry_after_seconds
            self.transport.write(STATUS_LINE[error.status] + head + b"\r\n" + body)
        self._linger(None)

    def _linger(self, reason: str | None) -> None:
        """Sends the end of the stream, and drops what still arrives for a while."""
        if reason is not None:
            self._connections.count(reason)
        self._is_refused = True
        self._lingers_until = self._connections.clock() + LINGER_SECONDS
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()
        if not self._is_counted:  # nobody looks after it
            self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _in_kernel(transport: asyncio.Transport) -> int:
    """Bytes that the client has not acknowledged. The kernel takes new ones only after a third of them, 1 MB and more:
    without this count a slow reader would look like none for minutes. 0 on systems that cannot count them."""
    count = bytearray(4)
    with contextlib.suppress(OSError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
    return int.from_bytes(count, sys.byteorder)


def _unchunked(app: ASGIApp, cycle: RequestResponseCycle) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The application for a client of HTTP/1.0, which knows no chunks: its answer ends with the connection."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        has_length = False

        async def send_plain(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
                if not has_length:
                    cycle.chunked_encoding = False
            elif not has_length and scope["method"] != "HEAD":
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_plain)

    return answer
