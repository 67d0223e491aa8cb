"""What all models of a server share: who may call, how calls come in, what is checked and billed, and their one end."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from sojourn.engine.config import EngineConfig
from sojourn.engine.server.arrival import Arrival, Endpoint
from sojourn.engine.server.body.reader import BodyReader
from sojourn.engine.server.call_response import CallResponse
from sojourn.engine.server.core.call import CANCELLED, SERVER_FAULT, Caller
from sojourn.engine.server.core.spare import Spare
from sojourn.engine.server.errors import ApiError, Rejection
from sojourn.engine.server.fleet.kv_event_publisher import KVEventPublisher
from sojourn.engine.server.gateway.access.access import Access
from sojourn.engine.server.gateway.moderation.moderation import Moderation
from sojourn.engine.server.gateway.usage.usage_log import UsageLog
from sojourn.engine.server.guests import Guests
from sojourn.engine.server.http.connections import Connections
from sojourn.engine.server.intake import Intake
from sojourn.engine.server.model import Model
from sojourn.engine.server.models.registry import Models
from sojourn.engine.server.openai.serializer import Serializer
from sojourn.interop.exported.spans import parent_of
from sojourn.metrics.records import RequestRecord

log = logging.getLogger(__name__)
OnEnd = Callable[[Caller, int, str | None, RequestRecord | None], None]  # as `Front.end`


class Front:
    """Owns the models, and what is of the server as a whole."""

    def __init__(self, config: EngineConfig, guests: Guests):
        """Raises SojournError where the first model, or a file of the operator, cannot be used."""
        self.config = config
        self._guests = guests
        self._spare = Spare()
        self.first = Model(config, guests, self._spare)
        self.kv_events = self.first.core.kv_events = None if config.kv_events is None else KVEventPublisher(config)
        self.models = Models(config, self.first, self._make_further)
        self.access = Access(config, self.first.telemetry.exporter)
        self.bodies, self.connections = BodyReader(config), Connections(config)
        self.moderation = None if config.moderation is None else Moderation(config.moderation)
        self.usage = UsageLog(config, self.first.name) if config.usage_dir is not None else None
        self.first.telemetry.usage = self.usage
        self.intake = Intake(self.access, self.bodies, self.models, self.moderation, self.usage)
        self.on_end: list[OnEnd] = [self.usage.end] if self.usage is not None else []  # beside the telemetry
        self._open: set[str] = set()  # ids of the calls without an end
        self._watches: list[asyncio.Task] = []

    async def answer(self, endpoint: Endpoint, request: Request) -> Response:
        """The response to a call, whose end reaches `end` exactly once. A CallResponse reports it later itself.

        Raises ApiError for a refusal.
        """
        arrival = Arrival(request, endpoint, self.caller(request))
        try:
            await self.intake.walk(arrival)
            response = await endpoint.answer(self, arrival)
        except ApiError as refusal:
            if isinstance(refusal, Rejection):
                self.first.telemetry.exporter.observe_rejection(refusal.code)
            self.end(arrival, refusal.status, refusal.code, refusal.record)
            raise
        except ClientDisconnect:
            self.end(arrival, *CANCELLED)
            raise
        except BaseException:
            self.end(arrival, *SERVER_FAULT)
            raise
        finally:
            if arrival.model is not None:
                self.models.leave(arrival.served)
        if not isinstance(response, CallResponse):
            self.end(arrival, response.status_code)
        return response

    def follow(self, arrival: Arrival, serializer: Serializer) -> Response:
        """The response that follows a call until its record is there."""
        before_last = None if self.usage is None else partial(self.usage.answer, arrival.call)
        return CallResponse(
            arrival.call, serializer, partial(self.end, arrival), before_last, stream=arrival.body.stream
        )

    def end(self, arrival: Arrival, status: int, code: str | None = None, record: RequestRecord | None = None) -> None:
        """Takes the end of a call of an endpoint: each call, however it ends, comes here exactly once.

        `status` and `code` are those of the error where it failed behind the first byte, too: (499, "cancelled") where
        the client left, (500, "server_fault") where the server failed on it. `record` is None if the core never got it.
        """
        caller = arrival.caller
        self._open.remove(caller.request_id)
        if arrival.admission is not None:
            arrival.admission.end(record)
        if record is not None:
            self._record(arrival.model or self.first, caller, record)
        for notify in self.on_end:
            try:
                notify(caller, status, code, record)
            except Exception:  # the others must hear of it, too
                log.exception("the end of request %s was not taken by %r", caller.request_id, notify)

    def caller(self, request: Request) -> Caller:
        """Who sends the call of which the head is here. Its end must reach `end`."""
        request_id = request.state.request_id
        if request_id in self._open:  # two calls of a client may have one name
            request_id = request.state.request_id = f"{request_id}-{time.monotonic_ns()}"
        self._open.add(request_id)
        traceparent = request.headers.get("traceparent")
        session = request.headers.get("x-session-id", "")[:128]
        return Caller(
            request_id=request_id,
            arrived_ns=request.state.arrived_ns,
            tenant=request.state.tenant.name,
            klass=request.headers.get("x-sojourn-class", "")[:128],
            route=request.url.path,
            key_id=request.state.tenant.key_id or None,
            session=session or None,
            traceparent=traceparent if parent_of(traceparent) is not None else None,
        )

    async def start(self) -> None:
        """Loads the first model, and begins what goes on for as long as the server does."""
        await self.first.core.start()
        self.first.grammars.start()
        self.first.watch()
        watches = [self.access.watch(), self.connections.watch(), self.models.watch()]
        if self.usage is not None:
            watches.append(self.usage.run())
        if self.moderation is not None:
            watches.append(self.moderation.watch())
        if self.kv_events is not None:
            watches.append(self.kv_events.answer_replays())
        self._watches = [asyncio.create_task(watch) for watch in watches]

    async def stop(self) -> None:
        """Ends all cores and all that `start` began, and closes."""
        for task in self._watches:
            task.cancel()
        await asyncio.gather(*self._watches, *(model.stop_watching() for model in self.models.built),
                             return_exceptions=True)  # fmt: skip
        await self.models.stop()
        await self._spare.stop()
        for model in self.models.built:
            await model.grammars.stop()
        if self.moderation is not None:
            await self.moderation.close()
        self.close()

    def close(self) -> None:
        """Writes the rest of records and usage, and checks no more bodies. Raises nothing: `failure`."""
        self.bodies.close()
        for model in self.models.built:
            model.telemetry.close()
        if self.usage is not None:
            self.usage.close()
        if self.kv_events is not None:
            self.kv_events.close()

    @property
    def failure(self) -> str | None:
        """Once closed: what was lost of records and usage, as a sentence."""
        lost = [model.telemetry.failure for model in self.models.built]
        lost.append(None if self.usage is None else self.usage.failure)
        return "; ".join(sentence for sentence in lost if sentence) or None

    def _make_further(self, config: EngineConfig) -> Model:
        model = Model(config, self._guests, self._spare)
        model.core.state = "cold"
        return model

    def _record(self, model: Model, caller: Caller, record: RequestRecord) -> None:
        """A run holds the requests of all models in one table. Steps are counted by model."""
        model.telemetry.request(record, caller.attributes)
        if model is not self.first and (recorder := self.first.telemetry.recorder) is not None:
            recorder.append("requests", msgspec.structs.replace(record, first_step=None, last_step=None))
