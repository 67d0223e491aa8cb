"""One call of an endpoint: who sent it, its body, its answer, and its one end."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.call_response import CallResponse
from sojourn.engine.server.core.call import CANCELLED, SERVER_FAULT, Caller
from sojourn.engine.server.errors import ApiError, Rejection
from sojourn.engine.server.gateway.access.admission import Admission
from sojourn.engine.server.openai.protocol import GenerationRequest
from sojourn.engine.server.service import Service


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A POST route: the model of its body, and what answers a checked one."""

    body: type[Strict]
    answer: Callable[[Service, Request, Any], Awaitable[Response]]
    is_queued: bool = True  # its calls need a place in the core's queue


async def answer_call(service: Service, endpoint: Endpoint, request: Request) -> Response:
    """The response to a call, whose end reaches `Service.ended` exactly once. A CallResponse reports it later itself.

    Raises ApiError for a refusal.
    """
    caller = request.state.caller = service.caller(request)
    try:
        response = await _answer(service, endpoint, request, caller)
    except ApiError as refusal:
        if isinstance(refusal, Rejection):
            service.telemetry.exporter.observe_rejection(refusal.code)
        service.ended(caller, refusal.status, refusal.code, refusal.record)
        raise
    except ClientDisconnect:
        service.ended(caller, *CANCELLED)
        raise
    except BaseException:
        service.ended(caller, *SERVER_FAULT)
        raise
    if not isinstance(response, CallResponse):
        service.ended(caller, response.status_code)
    return response


async def _answer(service: Service, endpoint: Endpoint, request: Request, caller: Caller) -> Response:
    caller.admission = Admission(service.access, request, caller)
    await caller.admission.begin()
    if endpoint.is_queued and service.models.is_single and service.models.first.is_hot:
        service.admit(1, 1)  # a call that has no chance costs no body
    body = await service.bodies.parse(endpoint.body, request)
    caller.arrived_ns = request.state.arrived_ns  # a slow upload is the client's time
    await caller.admission.wait()
    if not request.state.tenant.key_id:  # with a key the key alone says whose call it is
        caller.tenant = caller.tenant or body.tenant[:128]
    model = service.models.find(body.served_model)
    if model is None:
        model, caller.adapter = service.models.first, service.check_model(body.served_model)
    caller.admission.check(body)
    async with service.models.using(model, request, caller, computes=endpoint.is_queued) as chosen:
        if isinstance(body, GenerationRequest):
            body.take_defaults(chosen.defaults)
        return await endpoint.answer(chosen, request, body)
