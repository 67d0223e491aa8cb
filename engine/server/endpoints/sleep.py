"""POST /sleep and /wake_up, GET /is_sleeping: as vLLM has them, with the name of a model where there are several."""

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from sojourn.engine.server.errors import ApiError, invalid, unknown_model
from sojourn.engine.server.models.registry import Models
from sojourn.engine.server.models.served_model import ServedModel

ASLEEP = ("falling_asleep", "sleeping", "waking", "cold")  # states of a core that a request ends


def add_sleep_routes(app: FastAPI, models: Models) -> None:
    @app.post("/sleep", include_in_schema=False)  # without a body there is nothing to describe
    async def sleep(request: Request) -> Response:
        level = _query(request, {"level", "model"}).get("level", "1")
        if level not in ("1", "2"):
            raise invalid("level", f"`level`={level[:40]} is not known; 1 gives back the KV pool, 2 the weights, too")
        await models.fall_asleep(_model(models, request), int(level))
        return Response(status_code=200)

    @app.post("/wake_up", include_in_schema=False)
    async def wake_up(request: Request) -> Response:
        _query(request, {"model"})
        await models.wake(_model(models, request))
        return Response(status_code=200)

    @app.get("/is_sleeping")
    async def is_sleeping(request: Request) -> dict[str, Any]:
        _query(request, {"model"})
        return {"is_sleeping": _model(models, request).state in ("sleeping", "cold")}


def _model(models: Models, request: Request) -> ServedModel:
    """That of the query, or the first one. Raises ApiError 404."""
    name = request.query_params.get("model")
    found = models.find(name)
    if found is None:
        raise unknown_model(name, [model.name for model in models.all])
    return found


def _query(request: Request, known: set[str]) -> dict[str, str]:
    unknown = sorted(set(request.query_params) - known)
    if unknown:
        message = f"`{unknown[0][:40]}` is not a parameter of this path; it knows {', '.join(sorted(known))}"
        raise ApiError(400, message, param=unknown[0][:40], code="unknown_parameter")
    return dict(request.query_params)
