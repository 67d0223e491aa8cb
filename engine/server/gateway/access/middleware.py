"""The door: every request needs a key where keys are set, whatever its path, method or protocol."""

from fastapi import FastAPI
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.gateway.access.access import Access
from sojourn.engine.server.gateway.access.rules import AccessError


class AccessMiddleware:
    """ASGI middleware. Puts `tenant` into the request's state, and the headers of rate limits into its response.

    It decides by the path of the scope and never by the `Host` header. What it does not know is refused.
    """

    def __init__(self, app: ASGIApp, access: Access):
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        state = scope.setdefault("state", {})
        try:
            state["tenant"] = self._access.identify(scope)
        except ApiError as error:
            return await _refuse(error, scope, receive, send)

        async def send_with_levels(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *state.get("rate_limit_headers", ())]
            await send(message)

        await self._app(scope, receive, send_with_levels)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket" and "websocket.http.response" not in scope.get("extensions", {}):
        return await send({"type": "websocket.close", "code": 1008, "reason": error.message})
    response = error.response(scope["path"])
    if error.status == 401:
        MutableHeaders(raw=response.raw_headers)["www-authenticate"] = 'Bearer realm="sojourn"'
    await response(scope, receive, send)


def add_reload_route(app: FastAPI, access: Access) -> None:
    """POST /debug/reload: the same as SIGHUP, but it says what is wrong."""

    @app.post("/debug/reload", include_in_schema=False)  # without a body there is nothing to describe
    async def reload() -> dict[str, int]:
        try:
            await access.reload()
        except AccessError as error:
            raise ApiError(409, f"the old rules stay in force: {error}", code="reload_failed") from None
        return {"tiers": len(access.rules.tier_names), "keys": len(access.rules.keys)}
