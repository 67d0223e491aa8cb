"""The FastAPI application: routes, and the life of the core behind them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sojourn.engine.config import EngineConfig
from sojourn.engine.server import token_api
from sojourn.engine.server.anthropic import messages_api
from sojourn.engine.server.anthropic.messages_request import CountTokensRequest, MessagesRequest
from sojourn.engine.server.core.sequence import oldest_wait_seconds
from sojourn.engine.server.debug import add_debug_routes
from sojourn.engine.server.endpoint import Endpoint, answer_call
from sojourn.engine.server.errors import ApiError
from sojourn.engine.server.fleet import render
from sojourn.engine.server.fleet.routes import add_fleet_routes
from sojourn.engine.server.gateway.access.middleware import AccessMiddleware, add_reload_route
from sojourn.engine.server.gateway.moderation.api import ModerationRequest, moderate
from sojourn.engine.server.http.web_pages import WebPageGuard, with_cors
from sojourn.engine.server.middleware import RequestMiddleware, show_api_error, show_http_error
from sojourn.engine.server.models.registry import Models
from sojourn.engine.server.models.sleep_routes import ASLEEP, add_sleep_routes
from sojourn.engine.server.openai.chat_request import ChatRequest, DetokenizeRequest, TokenizeRequest
from sojourn.engine.server.openai.protocol import CompletionRequest
from sojourn.engine.server.openai.responses_request import ResponsesRequest
from sojourn.engine.server.service import Service
from sojourn.engine.techniques.lora.served import add_adapter_routes
from sojourn.interop.exported.prometheus_series import merged
from sojourn.metrics.machine.host import own_version

# A new endpoint is a line here.
ENDPOINTS = {
    "/v1/completions": Endpoint(CompletionRequest, Service.complete),
    "/v1/chat/completions": Endpoint(ChatRequest, Service.chat),
    "/v1/responses": Endpoint(ResponsesRequest, Service.respond),
    "/v1/messages": Endpoint(MessagesRequest, messages_api.answer_message),
    "/v1/messages/count_tokens": Endpoint(CountTokensRequest, messages_api.count_tokens, is_queued=False),
    "/tokenize": Endpoint(TokenizeRequest, token_api.tokenize, is_queued=False),
    "/detokenize": Endpoint(DetokenizeRequest, token_api.detokenize, is_queued=False),
    "/v1/completions/render": Endpoint(CompletionRequest, render.completion, is_queued=False),
    "/v1/chat/completions/render": Endpoint(ChatRequest, render.chat, is_queued=False),
    "/v1/responses/render": Endpoint(ResponsesRequest, render.respond, is_queued=False),
    "/v1/moderations": Endpoint(ModerationRequest, moderate, is_queued=False),
}


def build_app(config: EngineConfig) -> FastAPI:
    """The ASGI application of one model; its core starts with the application and ends with it.

    Raises ModelError if the tokenizer cannot be read, and RunDataError if the run directory cannot be written. `/ready`
    reports a core that cannot start.
    """
    service = Service(config)
    models = Models(config, service)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.core.start()
        service.grammar_checks.start()
        telemetry = service.telemetry.watches(service.core.pid)
        watches = [*telemetry, *service.usage_watches(), service.access.watch(), service.connections.watch()]
        watches.append(models.watch())
        if service.moderation is not None:
            watches.append(service.moderation.watch())
        if service.kv_events is not None:
            watches.append(service.kv_events.answer_replays())
        watching = [asyncio.create_task(watch) for watch in watches]
        yield
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)  # the last sample of the machine
        await models.stop()
        await service.grammar_checks.stop()
        if service.moderation is not None:
            await service.moderation.close()
        service.close()

    app = FastAPI(title="Sojourn", lifespan=lifespan)
    app.state.service = service
    # The last one is the outermost.
    app.add_middleware(AccessMiddleware, access=service.access)
    app.add_middleware(WebPageGuard, config=config, on_refusal=service.telemetry.exporter.observe_rejection)
    app.add_middleware(with_cors, config=config)
    app.add_middleware(RequestMiddleware)
    app.add_exception_handler(ApiError, show_api_error)
    app.add_exception_handler(HTTPException, show_http_error)
    for path, endpoint in ENDPOINTS.items():
        _add_endpoint(app, service, path, endpoint)
    _add_service_routes(app, service, config)
    if config.debug_routes == "on":
        add_debug_routes(app, service.core, service.telemetry, service.bodies, _body_of)
    if config.lora_runtime_loading:
        add_adapter_routes(app, service.adapters, service.core, service.bodies, _body_of)
    add_reload_route(app, service.access)
    add_fleet_routes(app, service)
    add_sleep_routes(app, models)
    return app


def _add_endpoint(app: FastAPI, service: Service, path: str, endpoint: Endpoint) -> None:
    async def answer(request: Request) -> Response:
        return await answer_call(service, endpoint, request)

    name = path.removeprefix("/v1/").strip("/").replace("/", "_")
    app.add_api_route(path, answer, methods=["POST"], name=name, openapi_extra=_body_of(endpoint.body))


def _add_service_routes(app: FastAPI, service: Service, config: EngineConfig) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": service.cards()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        found = service.models.find(name)
        if found is not None:
            return found.card()
        service.check_model(name)
        return service.adapters.card(name)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": own_version()}

    @app.get("/health")
    async def health() -> Response:
        """Alive: 200 while loading, ready or draining, 503 while the core is dead or hung."""
        return _state(service, healthy=service.core.state in ("loading", "ready", "draining", *ASLEEP))

    @app.get("/ready")
    async def ready() -> Response:
        """Takes requests, and wakes for them if it sleeps: 200, or 503 while loading, hung, restarting or draining."""
        return _state(service, healthy=service.core.state in ("ready", *ASLEEP))

    @app.get("/metrics")
    async def metrics() -> Response:
        for each in service.models.services:
            await each.telemetry.refresh()
            each.telemetry.exporter.core.observe_oldest_wait(oldest_wait_seconds(each.core.streams.values()))
        if service.moderation is not None:
            events = service.moderation.events
            service.telemetry.exporter.observe_moderation(events.flagged, events.failed)
        if config.has_loras:
            running, waiting = service.core.adapters_by_state()
            service.telemetry.exporter.observe_adapters(config.max_loras, running, waiting)
        service.telemetry.exporter.observe_connections(len(service.connections.open), service.connections.closed)
        page = merged([each.telemetry.scrape() for each in service.models.services])
        return PlainTextResponse(page, media_type=service.telemetry.exporter.content_type)


def _state(service: Service, *, healthy: bool) -> JSONResponse:
    core = service.core
    body: dict[str, Any] = {"status": core.state, "detail": core.failure}
    if core.ready is not None and core.ready.changes_outputs:
        body["changes_outputs"] = core.ready.changes_outputs
    return JSONResponse(body, 200 if healthy else 503)


def _body_of(kind: type) -> dict[str, Any]:
    """The schema of a body for /docs. FastAPI does not parse bodies, so that errors have the official shape."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
