"""The composition of the server: its techniques, its endpoints, and the front behind them."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.anthropic.messages_request import MESSAGES_FIELDS, CountTokensRequest, MessagesRequest
from sojourn.engine.server.arrival import Endpoint
from sojourn.engine.server.endpoints import generation, messages, moderations, render, tokens
from sojourn.engine.server.endpoints.debug import add_debug_routes
from sojourn.engine.server.endpoints.fleet import add_fleet_routes
from sojourn.engine.server.endpoints.sleep import add_sleep_routes
from sojourn.engine.server.endpoints.status import add_status_routes
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.front import Front
from sojourn.engine.server.gateway.access.middleware import AccessMiddleware, add_reload_route
from sojourn.engine.server.guests import Guests
from sojourn.engine.server.http.web_pages import WebPageGuard, with_cors
from sojourn.engine.server.middleware import RequestMiddleware, show_api_error, show_http_error
from sojourn.engine.server.openai.chat_request import ChatRequest, DetokenizeRequest, TokenizeRequest
from sojourn.engine.server.openai.protocol import CompletionRequest
from sojourn.engine.server.openai.responses_request import RESPONSES_PARAMS, ResponsesRequest
from sojourn.engine.techniques import load
from sojourn.metrics.errors import ModelError

RESPONSE = {"as_chat": generation.response_as_chat, "names": RESPONSES_PARAMS}
MESSAGE = {"as_chat": messages.message_as_chat, "names": MESSAGES_FIELDS}
# A new endpoint is a line here.
ENDPOINTS = {
    "/v1/completions": Endpoint(CompletionRequest, generation.answer_completion),
    "/v1/chat/completions": Endpoint(ChatRequest, generation.answer_chat),
    "/v1/responses": Endpoint(ResponsesRequest, generation.answer_response, **RESPONSE),
    "/v1/messages": Endpoint(MessagesRequest, messages.answer_message, **MESSAGE),
    "/v1/messages/count_tokens": Endpoint(CountTokensRequest, messages.count_tokens, "prompt", **MESSAGE),
    "/tokenize": Endpoint(TokenizeRequest, tokens.tokenize, "body"),
    "/detokenize": Endpoint(DetokenizeRequest, tokens.detokenize, "body"),
    "/v1/completions/render": Endpoint(CompletionRequest, render.render_completion, "prompt"),
    "/v1/chat/completions/render": Endpoint(ChatRequest, render.render_chat, "prompt"),
    "/v1/responses/render": Endpoint(ResponsesRequest, render.render_chat, "prompt", **RESPONSE),
    "/v1/moderations": Endpoint(moderations.ModerationRequest, moderations.moderate, "body"),
}


def build_app(config: EngineConfig) -> FastAPI:
    """The ASGI application; the core of its first model starts with the application and ends with it.

    Raises ModelError if the tokenizer cannot be read, and RunDataError if the run directory cannot be written. `/ready`
    reports a core that cannot start.
    """
    front = Front(config, guests_of(config))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await front.start()
        yield
        await front.stop()

    app = FastAPI(title="Sojourn", lifespan=lifespan)
    app.state.front = front
    # The last one is the outermost.
    app.add_middleware(AccessMiddleware, access=front.access)
    app.add_middleware(WebPageGuard, config=config, on_refusal=front.first.telemetry.exporter.observe_rejection)
    app.add_middleware(with_cors, config=config)
    app.add_middleware(RequestMiddleware)
    app.add_exception_handler(ApiError, show_api_error)
    app.add_exception_handler(HTTPException, show_http_error)
    for path, endpoint in ENDPOINTS.items():
        _add_endpoint(app, front, path, endpoint)
    add_status_routes(app, front)
    if config.debug_routes == "on":
        add_debug_routes(app, front.first.core, front.first.telemetry, front.bodies, _body_of)
    if config.lora_runtime_loading:
        load("lora", "served").add_routes(app, front.first.adapters, front.first.core, front.bodies, _body_of)
    add_reload_route(app, front.access)
    add_fleet_routes(app, front)
    if config.kv_role is not None:
        load("handover", "served").add_routes(app, config, front.first.core)
    add_sleep_routes(app, front.models)
    return app


def guests_of(config: EngineConfig) -> Guests:
    """Raises ModelError where the settings ask for a technique that this installation lacks."""
    try:
        grammars = load("grammar", "checks").GrammarChecks
    except ModelError:  # no setting asks for it, and a body that does is refused
        grammars = None
    return Guests(
        adapters=load("lora", "served").ServedAdapters if config.has_loras else None,
        grammars=grammars,
        transfers=load("handover", "served").ServedTransfers if config.kv_role is not None else None,
    )


def _add_endpoint(app: FastAPI, front: Front, path: str, endpoint: Endpoint) -> None:
    async def answer(request: Request) -> Response:
        return await front.answer(endpoint, request)

    name = path.removeprefix("/v1/").strip("/").replace("/", "_")
    app.add_api_route(path, answer, methods=["POST"], name=name, openapi_extra=_body_of(endpoint.body))


def _body_of(kind: type) -> dict[str, Any]:
    """The schema of a body for /docs. FastAPI does not parse bodies, so that errors have the official shape."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
