"""GET /health, /ready, /version, /metrics and /v1/models: what the server is, and how it is."""

from typing import Any

from fastapi import FastAPI
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sojourn.engine.server.core.sequence import oldest_wait_seconds
from sojourn.engine.server.endpoints.sleep import ASLEEP
from sojourn.engine.server.front import Front
from sojourn.interop.exported.prometheus_series import merged
from sojourn.metrics.version import own_version


def add_status_routes(app: FastAPI, front: Front) -> None:
    first = front.first

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        cards = [model.card() for model in front.models.all]
        return {"object": "list", "data": [*cards, *(first.adapters.card(name) for name in first.adapters.names)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        found = front.models.find(name)
        if found is not None:
            return found.card()
        front.models.find_adapter(name)
        return first.adapters.card(name)

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": own_version()}

    @app.get("/health")
    async def health() -> Response:
        """Alive: 200 while loading, ready or draining, 503 while the core is dead or hung."""
        return state(is_healthy=first.core.state in ("loading", "ready", "draining", *ASLEEP))

    @app.get("/ready")
    async def ready() -> Response:
        """Takes requests, and wakes for them if it sleeps: 200, or 503 while loading, hung, restarting or draining."""
        return state(is_healthy=first.core.state in ("ready", *ASLEEP))

    def state(*, is_healthy: bool) -> JSONResponse:
        core = first.core
        body: dict[str, Any] = {"status": core.state, "detail": core.failure}
        if core.ready is not None and core.ready.changes_outputs:
            body["changes_outputs"] = core.ready.changes_outputs
        return JSONResponse(body, 200 if is_healthy else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        for model in front.models.built:
            await model.telemetry.refresh()
            model.telemetry.exporter.core.observe_oldest_wait(oldest_wait_seconds(model.core.streams.values()))
        exporter = first.telemetry.exporter
        if front.moderation is not None:
            exporter.observe_moderation(front.moderation.events.flagged, front.moderation.events.failed)
        first.adapters.observe(exporter, first.core)
        if front.usage is not None:
            exporter.observe_prices(front.usage.priced)
        exporter.observe_connections(len(front.connections.open), front.connections.closed)
        page = merged([model.telemetry.scrape() for model in front.models.built])
        return PlainTextResponse(page, media_type=exporter.content_type)
