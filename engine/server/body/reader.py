"""Request bodies: read within a size, a time and a budget, and checked where no stream waits for it."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from starlette.requests import Request

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.body.strict import Body, parse
from sojourn.engine.server.errors import ApiError, Rejection

OFF_LOOP_BYTES = 65_536  # larger bodies are checked in a thread: 64 kB take 5 ms at worst


class BodyReader:
    """Reads and checks the bodies of one server.

    One thread checks the large ones, one after another: several would take the interpreter from the event loop in turn.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self._open_bytes = 0  # of all bodies that are read or checked now
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="bodies")

    async def parse(self, kind: type[Body], request: Request) -> Body:
        """The checked body of a request.

        Raises ApiError: 400 for what it says, 408 when it comes too slowly, 413 when it is too large and 503 while
        other bodies fill the memory for them; ClientDisconnect for a client that leaves.
        """
        chunks: list[bytes] = []
        try:
            await self._read(request, chunks)
            request.state.arrived_ns = time.monotonic_ns()  # a slow upload is the client's time
            content = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            if len(content) <= OFF_LOOP_BYTES:
                return parse(kind, content)
            return await asyncio.get_running_loop().run_in_executor(self._thread, partial(parse, kind, content))
        finally:
            self._open_bytes -= sum(map(len, chunks))

    def close(self) -> None:
        """No body is checked any more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read(self, request: Request, chunks: list[bytes]) -> None:
        """Appends to `chunks`."""
        limit, size = self._config.max_body_bytes, 0
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(limit)
        ends = asyncio.get_running_loop().time() + self._config.body_seconds
        parts = request.stream()
        while (chunk := await self._next(parts, ends)) is not None:
            chunks.append(chunk)
            size += len(chunk)
            self._open_bytes += len(chunk)
            if size > limit:
                raise _too_large(limit)
            if size > OFF_LOOP_BYTES and self._open_bytes > self._config.max_open_body_bytes:  # small ones may pass
                message = f"the bodies of other requests fill max_open_body_bytes, {self._config.max_open_body_bytes}"
                message += " bytes; try again after the given time"
                raise Rejection(503, message, code="bodies_full", retry_after_seconds=1)

    async def _next(self, parts, ends: float) -> bytes | None:
        """The next part; None after the last. Raises ApiError 408."""
        idle = self._config.body_idle_seconds
        try:
            async with asyncio.timeout_at(min(ends, asyncio.get_running_loop().time() + idle)):
                return await anext(parts, None)
        except TimeoutError:
            message = f"the body did not arrive in time: {idle:g} s between two parts and {self._config.body_seconds:g}"
            raise Rejection(408, f"{message} s in all are the limits; send it again", code="body_timeout") from None


def _too_large(limit: int) -> ApiError:
    return Rejection(
        413, f"the body is larger than max_body_bytes, {limit} bytes; send a shorter prompt", code="body_too_large"
    )
