"""Generations as OpenAI responses: streamed as server-sent events, or whole; given up when the client goes away."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.server.errors import ApiError
from engine.server.generation import Generation, Piece
from metrics.records import RequestRecord

_json = msgspec.json.Encoder().encode
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Shape:
    """How completions and chat completions word the same facts."""

    def __init__(self, kind: str, request_id: str, model: str):
        self.chat = kind == "chat"
        self.base = {
            "id": f"{'chatcmpl' if self.chat else 'cmpl'}-{request_id}",
            "created": int(time.time()),
            "model": model,
        }

    def chunk(self, text: str, finish_reason: str | None, *, first: bool) -> dict[str, Any]:
        """One streamed piece. A chat's first chunk names the role."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        if self.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | ({"content": text} if text or first else {})
        else:
            choice["text"] = text
        name = "chat.completion.chunk" if self.chat else "text_completion"
        return self.base | {"object": name, "choices": [choice]}

    def whole(self, text: str, finish_reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish_reason}
        choice |= {"message": {"role": "assistant", "content": text, "refusal": None}} if self.chat else {"text": text}
        name = "chat.completion" if self.chat else "text_completion"
        return self.base | {"object": name, "choices": [choice], "usage": usage}


def usage_of(generation: Generation) -> dict[str, Any]:
    return {
        "prompt_tokens": generation.prompt_tokens,
        "completion_tokens": generation.output_tokens,
        "total_tokens": generation.prompt_tokens + generation.output_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


class GenerationResponse(Response):
    """An ASGI response that follows a generation to its end and hands its record over.

    While it works it listens for the client's disconnect; then the core forgets the request within a step.
    """

    def __init__(
        self,
        generation: Generation,
        shape: Shape,
        on_record: Callable[[RequestRecord], None],
        *,
        stream: bool,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ):
        super().__init__()
        self._generation = generation
        self._shape = shape
        self._on_record = on_record
        self._work = self._stream if stream else self._whole
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = self._gone = asyncio.create_task(_disconnected(receive))
        work = asyncio.create_task(self._work(send))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            (failure, _) = await asyncio.gather(work, gone, return_exceptions=True)
            self._generation.abort()  # changes nothing if all was delivered
            self._on_record(await self._generation.record())
        if isinstance(failure, Exception) and not isinstance(failure, OSError):
            raise failure

    async def _stream(self, send: Send) -> None:
        generation, first = self._generation, True
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        try:
            async for piece in generation.pieces():
                events = [self._event(self._shape.chunk(piece.text, piece.finish_reason, first=first))]
                if piece.finish_reason:
                    if self._include_usage:
                        final = self._shape.chunk("", None, first=False) | {
                            "choices": [],
                            "usage": usage_of(generation),
                        }
                        events.append(b"data: " + _json(final) + b"\n\n")
                    events.append(b"data: [DONE]\n\n")
                last = piece.finish_reason is not None
                await self._deliver(send, {"body": b"".join(events), "more_body": not last}, piece)
                first = False
        except Exception as error:  # too late for a status: the stream says it, and ends without [DONE]
            shown = error if isinstance(error, ApiError) else ApiError(500, "the server failed on this request")
            body = b"data: " + _json(shown.body()) + b"\n\n"
            await send({"type": "http.response.body", "body": body, "more_body": False})
            if shown is not error:
                raise

    async def _whole(self, send: Send) -> None:
        texts: list[str] = []
        try:
            async for piece in self._generation.pieces():
                texts.append(piece.text)
        except ApiError as error:
            await error.response()({"type": "http"}, _never, send)
            return
        body = _json(self._shape.whole("".join(texts), piece.finish_reason, usage_of(self._generation)))
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._deliver(send, {"body": body}, piece)

    async def _deliver(self, send: Send, body: dict[str, Any], piece: Piece) -> None:
        """Writes a piece. A server that drops what it sends to a lost client returns as if nothing was amiss."""
        await send({"type": "http.response.body"} | body)
        if not self._gone.done():
            self._generation.written(piece)

    def _event(self, chunk: dict[str, Any]) -> bytes:
        if self._continuous_usage:
            chunk["usage"] = usage_of(self._generation)
        elif self._include_usage:
            chunk["usage"] = None
        return b"data: " + _json(chunk) + b"\n\n"


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _never() -> dict[str, Any]:
    raise RuntimeError("an error response reads no body")
