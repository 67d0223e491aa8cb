"""The outermost layer of the server: arrival times, request ids, one shape for all errors."""

import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sojourn.engine.server.errors import ANTHROPIC_PATH, ApiError

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class RequestMiddleware:
    """ASGI middleware. Puts `arrived_ns` and `request_id` into the request's state, and echoes `x-request-id`."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        state["arrived_ns"] = time.monotonic_ns()
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        state["request_id"] = request_id if _REQUEST_ID.fullmatch(request_id) else uuid.uuid4().hex
        has_started = False

        async def named_send(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = state["request_id"]  # as in its record
                if scope["path"].startswith(ANTHROPIC_PATH):
                    headers["request-id"] = state["request_id"]  # where Anthropic's clients look for it
            await send(message)

        try:
            await self._app(scope, receive, named_send)
        except ClientDisconnect:  # while its body was read: nobody waits for an answer
            return
        except Exception:  # a fault of ours; its traceback goes to the log
            if not has_started:
                fault = ApiError(500, "the server failed on this request; its log says why")
                await fault.response(scope["path"])(scope, receive, named_send)
            raise


async def show_api_error(request: Request, error: ApiError) -> JSONResponse:
    return error.response(request.scope["path"])


async def show_http_error(request: Request, error: HTTPException) -> JSONResponse:
    """404 for an unknown path and 405 for a wrong method, in the shape of all other errors."""
    headers = error.headers or {}
    allowed = f"; use {headers['Allow']}" if "Allow" in headers else ""
    shown = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}{allowed}")
    response = shown.response(request.scope["path"])
    response.headers.update(headers)
    return response
