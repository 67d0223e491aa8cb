"""Calls as HTTP responses: a stream of server-sent events, or a whole answer."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sojourn.engine.server.core.call import SERVER_FAULT, Call
from sojourn.engine.server.core.sequence import TextPiece
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.http.connections import wait_for_disconnect
from sojourn.engine.server.openai.serializer import Serializer
from sojourn.metrics.records import RequestRecord

STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
OnEnd = Callable[[int, str | None, RequestRecord | None], None]  # status, code and record of a call
BeforeLast = Callable[[int, str | None], None]  # status and code of an answer that is about to be complete


class CallResponse(Response):
    """An ASGI response that follows a call to its end and hands its record over: `on_end` is called once.

    It listens for the client's disconnect all the time. After one the core forgets the call within a step.
    """

    def __init__(
        self, call: Call, serializer: Serializer, on_end: OnEnd, before_last: BeforeLast | None = None, *, stream: bool
    ):
        super().__init__()
        self._call = call
        self._serializer = serializer
        self._on_end = on_end
        self._before_last = before_last or (lambda status, code: None)
        self._end: tuple[int, str | None, RequestRecord | None] = (*SERVER_FAULT, None)  # until the record is there
        self._streams = stream  # a bound method here would be a cycle, and a call would live until a garbage collection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._path = scope["path"]
        disconnect = self._disconnect = asyncio.create_task(wait_for_disconnect(receive))
        work = asyncio.create_task(self._stream(send) if self._streams else self._whole(send))
        try:
            await asyncio.wait((work, disconnect), return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A task of its own: a cancellation of this one costs neither the record nor the abort in the core.
            failure = await asyncio.shield(asyncio.create_task(self._finish(work, disconnect)))
        if failure is not None:
            raise failure

    async def _finish(self, work: asyncio.Task, disconnect: asyncio.Task) -> Exception | None:
        """Reports the end of the call. Returns the fault of ours that ended it."""
        try:
            for task in (work, disconnect):
                task.cancel()
            (failure, _) = await asyncio.gather(work, disconnect, return_exceptions=True)
            is_fault = isinstance(failure, Exception) and not isinstance(failure, OSError)
            if is_fault:
                self._call.fault()
            self._call.abort()  # no effect if all was delivered
            record = await self._call.record()
            self._end = (*self._call.outcome, record)
            return failure if is_fault else None
        finally:
            self._on_end(*self._end)

    async def _stream(self, send: Send) -> None:
        call, serializer = self._call, self._serializer
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        pending = serializer.opening()
        try:
            if pending:
                await send({"type": "http.response.body", "body": pending, "more_body": True})
            async for piece in call.pieces():
                if events := serializer.events(piece):
                    await self._deliver(send, {"body": events, "more_body": True}, piece)
            last = serializer.closing(piece.sequence)
            self._before_last(200, None)
            await self._deliver(send, {"body": last, "more_body": False}, piece)
        except Exception as error:  # too late for a status: the error is the last event
            shown = error if isinstance(error, ApiError) else ApiError(500, "the server failed on this request")
            self._before_last(shown.status, shown.code)
            await send({"type": "http.response.body", "body": serializer.failure(shown), "more_body": False})
            self._confirm(call.note_failure_write)
            if shown is not error:
                raise

    async def _whole(self, send: Send) -> None:
        try:
            pieces = [piece async for piece in self._call.pieces()]
        except ApiError as error:
            self._before_last(error.status, error.code)
            await error.response(self._path)({"type": "http"}, _never, send)
            self._confirm(self._call.note_failure_write)
            return
        body = self._serializer.body(pieces)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        self._before_last(200, None)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._deliver(send, {"body": body}, pieces[-1])

    async def _deliver(self, send: Send, body: dict[str, Any], piece: TextPiece) -> None:
        begin_ns = time.monotonic_ns()
        await send({"type": "http.response.body"} | body)
        self._call.writing_ns += time.monotonic_ns() - begin_ns
        self._confirm(partial(self._call.note_write, piece, ends=not body.get("more_body")))

    def _confirm(self, written: Callable[[], None]) -> None:
        """Calls `written` unless the client is gone: uvicorn silently drops what is sent to a lost client."""
        if not self._disconnect.done():
            written()


async def _never() -> dict[str, Any]:
    raise RuntimeError("an error response reads no body")
