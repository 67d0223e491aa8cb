"""The FastAPI application: routes, and the life of the core behind them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib import metadata
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, Response

from engine.config import EngineConfig
from engine.server import token_api
from engine.server.debug import add_debug_routes
from engine.server.edge import Edge, show_api_error, show_http_error
from engine.server.errors import ApiError
from engine.server.json_body import decode
from engine.server.openai import chat_request as protocol_chat
from engine.server.openai import protocol
from engine.server.openai import responses_request as openresponses
from engine.server.service import Service


def build_app(config: EngineConfig) -> FastAPI:
    """The ASGI application of one model; its core starts with the application and ends with it.

    Raises ModelError if the tokenizer cannot be read, and RunDataError if the run directory cannot be written. `/ready`
    reports a core that cannot start.
    """
    service = Service(config)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.core.start()
        service.grammar_checks.start()
        watching = [asyncio.create_task(watch) for watch in service.telemetry.watches(service.core.pid)]
        yield
        for task in watching:
            task.cancel()
        await service.core.stop()
        await service.grammar_checks.stop()
        service.telemetry.close()

    app = FastAPI(title="Sojourn", lifespan=lifespan)
    app.state.service = service
    app.add_middleware(Edge, max_body_bytes=config.max_body_bytes)
    app.add_exception_handler(ApiError, show_api_error)
    app.add_exception_handler(HTTPException, show_http_error)
    _add_generation_routes(app, service)
    _add_service_routes(app, service)
    add_debug_routes(app, service.core, service.telemetry, _body_of)
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=_body_of(protocol.CompletionRequest))
    async def completions(request: Request) -> Response:
        body = protocol.parse(protocol.CompletionRequest, decode(await request.body()))
        service.check_model(body.model)
        return await service.complete(request, body)

    @app.post("/v1/chat/completions", openapi_extra=_body_of(protocol_chat.ChatRequest))
    async def chat_completions(request: Request) -> Response:
        body = protocol.parse(protocol_chat.ChatRequest, decode(await request.body()))
        service.check_model(body.model)
        return await service.chat(request, body)

    @app.post("/v1/responses", openapi_extra=_body_of(openresponses.ResponsesRequest))
    async def responses(request: Request) -> Response:
        body = protocol.parse(openresponses.ResponsesRequest, decode(await request.body()))
        service.check_model(body.model)
        return await openresponses.create(service, request, body)

    @app.post("/tokenize", openapi_extra=_body_of(protocol_chat.TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        body = protocol.parse(protocol_chat.TokenizeRequest, decode(await request.body()))
        service.check_model(body.model)
        return JSONResponse(await token_api.tokenize(service, body))

    @app.post("/detokenize", openapi_extra=_body_of(protocol_chat.DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        body = protocol.parse(protocol_chat.DetokenizeRequest, decode(await request.body()))
        service.check_model(body.model)
        return JSONResponse(await token_api.detokenize(service, body))


def _add_service_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [service.card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return service.card()

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": metadata.version("sojourn")}

    @app.get("/health")
    async def health() -> Response:
        """Alive: 200 while loading, ready or draining, 503 while the core is dead."""
        return _state(service, healthy=service.core.state in ("loading", "ready", "draining"))

    @app.get("/ready")
    async def ready() -> Response:
        """Takes requests: 200, or 503 while loading, restarting or draining."""
        return _state(service, healthy=service.core.state == "ready")

    @app.get("/metrics")
    async def metrics() -> Response:
        await service.telemetry.settle()
        return PlainTextResponse(service.telemetry.scrape(), media_type=service.telemetry.exporter.content_type)


def _state(service: Service, *, healthy: bool) -> JSONResponse:
    return JSONResponse({"status": service.core.state, "detail": service.core.failure}, 200 if healthy else 503)


def _body_of(kind: type) -> dict[str, Any]:
    """The body's schema for /docs: bodies are parsed by hand, for errors in the official shape."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
