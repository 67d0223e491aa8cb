"""The latest records and a burst of profiled steps: GET /debug/steps, GET /debug/requests, POST /debug/profile."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from fastapi import FastAPI, Request
from pydantic import Field
from starlette.responses import JSONResponse, Response, StreamingResponse

from sojourn.engine.messages import Profile
from sojourn.engine.server.body.reader import BodyReader
from sojourn.engine.server.body.strict import Strict
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.core.questions import BURST
from sojourn.engine.server.errors import ApiError, engine_not_ready
from sojourn.engine.server.telemetry import recent
from sojourn.engine.server.telemetry.full import Telemetry
from sojourn.engine.server.telemetry.off import NoTelemetry
from sojourn.engine.server.telemetry.recent import RECENT_REQUESTS, RECENT_STEPS, Recent
from sojourn.interop.exported.perfetto import TraceRows, write_trace
from sojourn.metrics.compute.kernels import Burst, by_class, by_name
from sojourn.metrics.ledger import SERVER_ACCOUNTS
from sojourn.metrics.records import STAGES, RequestRecord, StepRecord
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.recorder import Recorder

SHOWN = 100  # records, by default
SHOWN_AT_ONCE = 32  # records, before the event loop may run other tasks
MAX_STEPS = 1_000  # of one burst
TOP_KERNELS = 30


class ProfileRequest(Strict):
    """POST /debug/profile: a burst of profiled steps."""

    unsupported: ClassVar[dict] = {}

    steps: int = Field(ge=1, le=MAX_STEPS, description="engine steps to profile, the next ones")
    timeout_s: float = Field(
        10.0, gt=0, le=300, description="then the burst ends with the steps that it has; without any that is an error"
    )


def add_debug_routes(
    app: FastAPI,
    core: CoreClient,
    telemetry: Telemetry | NoTelemetry,
    bodies: BodyReader,
    body_of: Callable[[type], dict[str, Any]],
) -> None:
    """The exporter counts what a burst found, and the run directory, if there is one, takes it."""
    latest, recorder = telemetry.recent, telemetry.recorder

    @app.get("/debug/steps")
    async def steps(request: Request) -> Response:
        _refuse_without_records(core, "steps")
        await telemetry.refresh()
        packed = latest.packed_steps(_last(request, RECENT_STEPS))
        return _stream_records("steps", packed, lambda record: step_fields(recent.step(record)))

    @app.get("/debug/requests")
    async def requests(request: Request) -> Response:
        _refuse_without_records(core, "requests")
        packed = latest.packed_requests(_last(request, RECENT_REQUESTS))
        return _stream_records("requests", packed, lambda record: request_fields(recent.request(record)))

    @app.get("/debug/requests/{request_id}")
    async def one_request(request_id: str) -> Response:
        _refuse_without_records(core, "requests")
        packed = latest.packed_request(request_id)
        if packed is None:
            message = f"no request {request_id[:128]!r} is among the last {RECENT_REQUESTS:,} that ended"
            raise ApiError(404, message, param="request_id", code="request_not_found")
        return JSONResponse(request_fields(recent.request(packed)))

    @app.post("/debug/profile", openapi_extra=body_of(ProfileRequest))
    async def profile(request: Request) -> Response:
        body = await bodies.parse(ProfileRequest, request)
        burst = await _burst(core, body)
        telemetry.exporter.system.observe_burst(by_class(burst.records))
        await telemetry.refresh()
        steps = _steps_of(burst, latest)
        shown = summary(burst, body.steps) | {"slowdown": slowdown(steps), "files": None}
        if recorder is not None:
            shown["files"] = await _files(burst, steps, latest, recorder)
        return JSONResponse(shown)


def step_fields(record: StepRecord) -> dict[str, Any]:
    return record.columns() | {"stages": dict(zip(STAGES, record.stages, strict=True))}


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """A request as a dictionary, its ledgers by the accounts that a server can see."""
    ledgers = {"ledger": record.ledger, "ttft": record.ttft}
    return msgspec.structs.asdict(record) | {
        name: {info.name: ledger[info.account] for info in SERVER_ACCOUNTS} for name, ledger in ledgers.items()
    }


def summary(burst: Burst, steps: int) -> dict[str, Any]:
    """A burst without its single kernels. Times are nanoseconds of the device."""
    windows, whole_ns = burst.windows, max(1, burst.window_ns)
    classes = {klass: {"ns": ns, "share": ns / whole_ns} for klass, ns in by_class(burst.records).items()}
    return {
        "steps": {"asked": steps, "profiled": len(windows), "first": windows[0].step, "last": windows[-1].step},
        "device": burst.device,
        "window_ns": burst.window_ns,
        "classes": classes,
        "kernels": [msgspec.structs.asdict(kernel) for kernel in by_name(burst.records)[:TOP_KERNELS]],
        "traced_kernels": burst.traced,
        "dropped_kernels": burst.dropped,
        "clock_error_ns": burst.clock_error_ns,
        "blocked_ns": burst.blocked_ns,
        "differs": burst.differs,
    }


def slowdown(steps: Sequence[StepRecord]) -> float | None:
    """The device time of steps over its prediction; None without a prediction."""
    known = [step for step in steps if step.predicted_ns]
    return sum(step.device_ns for step in known) / sum(step.predicted_ns for step in known) if known else None


def _refuse_without_records(core: CoreClient, what: str) -> None:
    """Raises ApiError 409 with telemetry=off: an empty list would say that nothing happened."""
    if core.config.telemetry == "off":
        message = f"telemetry=off keeps no records of {what}; start the server with telemetry=full"
        raise ApiError(409, message, code="telemetry_off")


async def _burst(core: CoreClient, body: ProfileRequest) -> Burst:
    """Raises ApiError: 503 without a core, 409 beside another burst or without a step, 500 if the profiler failed."""
    if core.state not in ("ready", "draining"):
        raise engine_not_ready(core.state)
    if core.questions.is_open(BURST):
        raise ApiError(409, "a profile burst is under way; wait for its answer", code="profile_running")
    burst = await core.questions.ask(BURST, Profile(body.steps, round(body.timeout_s * 1000)))
    if burst.failure is not None:
        raise ApiError(500, f"the profiler failed: {burst.failure}", code="profile_failed")
    if not burst.windows:
        message = f"no step ended within timeout_s={body.timeout_s:g}; send requests while you profile, or raise it"
        raise ApiError(409, message, param="timeout_s", code="no_steps")
    return burst


def _steps_of(burst: Burst, latest: Recent) -> list[StepRecord]:
    first, last = burst.windows[0].step, burst.windows[-1].step
    # Few steps have ended since the burst.
    return [step for step in latest.steps(2 * (latest.last_step - first + 1)) if first <= step.step <= last]


async def _files(burst: Burst, steps: Sequence[StepRecord], latest: Recent, recorder: Recorder) -> dict[str, str]:
    for record in burst.records:
        recorder.append("kernels", record)
    name = f"trace-{time.strftime('%Y%m%d-%H%M%S')}-step{burst.windows[0].step}.json.gz"
    packed = latest.packed_requests()

    def write() -> None:
        ended = [record for record in map(recent.request, packed) if record.finished_ns >= burst.windows[0].begin_ns]
        write_trace(recorder.directory / name, TraceRows(list(map(row, steps)), list(map(row, ended))), burst)

    await asyncio.to_thread(write)
    return {"run_dir": str(Path(recorder.directory).resolve()), "table": "kernels", "trace": name}


def _stream_records(name: str, stored: Sequence[Any], shown: Callable[[Any], dict[str, Any]]) -> Response:
    """{name: [records]}, encoded a few at a time: streams must not wait for megabytes of JSON."""
    encode = msgspec.json.encode

    async def chunks() -> AsyncIterator[bytes]:
        yield f'{{"{name}":['.encode()
        for first in range(0, len(stored), SHOWN_AT_ONCE):
            records = stored[first : first + SHOWN_AT_ONCE]
            yield (b"," if first else b"") + b",".join(encode(shown(record)) for record in records)
            await asyncio.sleep(0)
        yield b"]}"

    return StreamingResponse(chunks(), media_type="application/json")


def _last(request: Request, most: int) -> int:
    """The query's `last`. Raises ApiError 400."""
    unknown = sorted(set(request.query_params) - {"last"})
    if unknown:
        message = f"`{unknown[0][:40]}` is not a parameter of this path; it knows `last`"
        raise ApiError(400, message, param=unknown[0][:40], code="unknown_parameter")
    text = request.query_params.get("last", str(SHOWN))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:9]) <= most:
        message = f"`last`={text[:40]} is out of bounds; it is how many records to show, from 1 to {most:,}"
        raise ApiError(400, message, param="last", code="invalid_value")
    return int(text[:9])
