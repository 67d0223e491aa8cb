"""Requests, steps, kernels and counters on one time axis, as a trace that ui.perfetto.dev and chrome://tracing open.

The format is Chrome's trace events: `X` is a slice, `C` a counter, `i` an instant, `M` names a track; times are
microseconds, here since the trace's first moment, which `otherData` tells on the monotonic clock. Slices of a track are
nested, so requests that overlap lie in lanes.
"""

import gzip
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from sojourn.metrics.compute.kernels import Burst
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.ledger import SERVER_ACCOUNTS
from sojourn.metrics.records import STAGES
from sojourn.metrics.request.timeline import call_of
from sojourn.metrics.run.directory import RunDirectory

MAX_EVENTS = 1_000_000  # some 150 MB of JSON, 10 MB packed: what a browser still opens
REQUESTS, ENGINE, DEVICE, COUNTERS = 1, 2, 3, 4  # processes of the trace, in the order in which they are shown
_PROCESSES = {REQUESTS: "requests", ENGINE: "engine", DEVICE: "device", COUNTERS: "memory and queue"}
_STEPS, _BUSY, _KERNELS = 1, 1, 2  # tracks of the engine, and of the device

Row = Mapping[str, Any]  # of a table of records.tables.SCHEMAS
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TraceRows:
    """Rows of the tables of a run, any of them in any order."""

    steps: Sequence[Row] = ()
    requests: Sequence[Row] = ()
    client: Sequence[Row] = ()  # shown where the server has no record of the request
    system: Sequence[Row] = ()


@dataclass(slots=True)
class Written:
    """What a trace holds."""

    events: int = 0
    dropped: int = 0  # beyond the bound
    origin_ns: int = 0  # monotonic, of time 0


def run_rows(run: RunDirectory, from_s: float | None = None, to_s: float | None = None) -> TraceRows:
    """What a run recorded between two moments, in seconds since its first request or step: the machine is
    sampled while the model still loads. Raises RunDataError if it is nothing."""
    tables = {name: run.table(name) for name in ("steps", "requests", "client", "system")}
    columns = {
        "steps": ("begin_ns", "end_ns"), "requests": ("arrived_ns", "finished_ns"),
        "client": ("due_ns", "last_byte_ns"), "system": ("ns", "ns"),
    }  # fmt: skip
    starts = {name: frame[columns[name][0]].min() for name, frame in tables.items() if len(frame)}
    first = min((start for name, start in starts.items() if name != "system"), default=starts.get("system"))
    if first is None:
        raise RunDataError(f"{run.path} holds no record that could be drawn")
    begin = first + (from_s or 0) * 1e9
    end = math.inf if to_s is None else first + to_s * 1e9
    rows = {}
    for name, frame in tables.items():
        begins, ends = (frame[column].astype("float64") for column in columns[name])
        rows[name] = frame[(begins <= end) & (ends.fillna(begins) >= begin)].to_dict("records")
    if not any(rows.values()):
        until = "on" if to_s is None else f"to {to_s:g} s"
        raise RunDataError(
            f"{run.path} holds nothing from {from_s or 0:g} s {until}; times count from its first request or step"
        )
    return TraceRows(**rows)


def write_trace(path: Path, rows: TraceRows, burst: Burst | None = None, max_events: int = MAX_EVENTS) -> Written:
    """Writes a trace, compressed where the name ends in `.gz`. The first events are written where there are more than
    `max_events`: requests and counters, then steps, their stages, and kernels."""
    written = Written()
    groups = [
        _names(burst), _requests(rows), _counters(rows), _system(rows.system), _steps(rows.steps),
        _stages(rows.steps), _kernels(burst),
    ]  # fmt: skip
    origin_ns = written.origin_ns = _origin(rows, burst)
    encode = msgspec.json.Encoder(enc_hook=_plain).encode
    with (gzip.open if path.suffix == ".gz" else open)(path, "wb") as file:
        file.write(b'{"traceEvents":[\n')
        for event in itertools.chain.from_iterable(groups):
            if written.events >= max_events:
                written.dropped += 1
                continue
            for name in ("ts", "dur"):
                if name in event:
                    event[name] = (event[name] - (origin_ns if name == "ts" else 0)) / 1000
            file.write((b",\n" if written.events else b"") + encode(event))
            written.events += 1
        other = {"origin_monotonic_ns": origin_ns, "dropped_events": written.dropped}
        if burst is not None:
            other |= {"clock_error_ns": burst.clock_error_ns, "dropped_kernels": burst.dropped}
        file.write(b'\n],"displayTimeUnit":"ms","otherData":' + encode(other) + b"}\n")
    return written


def _names(burst: Burst | None) -> Iterator[Event]:
    for process, name in _PROCESSES.items():
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "tid": 0, "name": "process_sort_index", "args": {"sort_index": process}}
    tracks = [(ENGINE, _STEPS, "steps and their stages"), (DEVICE, _BUSY, "busy")]
    if burst is not None:
        tracks += [
            (DEVICE, _KERNELS + track, f"kernels {track}") for track in sorted({run.track for run in burst.runs()})
        ]
    for process, track, name in tracks:
        yield {"ph": "M", "pid": process, "tid": track, "name": "thread_name", "args": {"name": name}}


def _origin(rows: TraceRows, burst: Burst | None) -> int:
    moments = [
        *(row["begin_ns"] for row in rows.steps), *(row["arrived_ns"] for row in rows.requests),
        *(row["due_ns"] for row in rows.client), *(row["ns"] for row in rows.system),
        *(window.begin_ns for window in (burst.windows if burst is not None else ())),
    ]  # fmt: skip
    return int(min(moments, default=0))


# Requests: their phases lie between readings of the clock, what is booked to them stands in the arguments.


def _requests(rows: TraceRows) -> Iterator[Event]:
    steps = {int(row["step"]): row for row in rows.steps}
    seen = {row["request_id"] for row in rows.requests}
    slices = [_request(row, steps) for row in rows.requests]
    slices += [_client(row) for row in rows.client if row["request_id"] not in seen]
    slices += _unfinished(rows.steps, seen)
    lanes: list[int] = []  # the end of the last slice in each
    lane_of: dict[str, int] = {}
    for whole, phases in sorted(slices, key=lambda item: item[0]["ts"]):
        lane = next((place for place, end in enumerate(lanes) if end <= whole["ts"]), len(lanes))
        lanes[lane : lane + 1] = [whole["ts"] + whole["dur"]]
        lane_of[whole["name"]] = lane + 1
        for event in (whole, *phases):
            yield event | {"pid": REQUESTS, "tid": lane + 1}
    for row in rows.steps:
        for victim in _listed(row["preempted_ids"]):
            where = {"pid": REQUESTS, "tid": lane_of.get(call_of(victim), 0)}
            yield {"ph": "i", "s": "t", "name": "preempted", "ts": int(row["begin_ns"]), "args": {"id": victim}} | where


def _request(row: Row, steps: Mapping[int, Row]) -> tuple[Event, list[Event]]:
    ledger = {info.name: _whole(row, f"ledger_{info.column}") for info in SERVER_ACCOUNTS}
    arguments = {
        **{name: row[name] if isinstance(row[name], str) else None for name in _TEXT_COLUMNS},
        "prompt_tokens": _whole(row, "prompt_tokens"), "cached_tokens": _whole(row, "cached_tokens"),
        "output_tokens": _whole(row, "output_tokens"), "preemptions": _whole(row, "preemptions"),
        "ledger_ns": {name: ns for name, ns in ledger.items() if ns},
    }  # fmt: skip
    begin, end = int(row["arrived_ns"]), int(row["finished_ns"])
    return _slices(row["request_id"], "request", begin, end, _phases(row, steps), arguments)


def _phases(row: Row, steps: Mapping[int, Row]) -> list[tuple[str, int]]:
    """Each phase of a request and its end, in order."""
    arrived, finished = int(row["arrived_ns"]), int(row["finished_ns"])
    tokens = [int(ns) for ns in _listed(row["token_ns"])]
    encoded = _whole(row, "encoded_ns") or arrived + (_whole(row, "ledger_token_encode_ns") or 0)
    quota, cold = (
        _whole(row, f"ledger_request_{name}_ns") or 0 for name in ("quota", "cold_start")
    )  # None in older runs
    first_step = steps.get(_whole(row, "first_step"))
    waited = sum(_whole(row, f"ledger_{name}_ns") or 0 for name in _BEFORE_THE_FIRST_STEP)
    scheduled = int(first_step["begin_ns"]) if first_step is not None else encoded + waited
    written = _whole(row, "written_ns") or finished
    has_run = _whole(row, "first_step") is not None
    phases = [("quota", arrived + quota)] if quota else []
    phases += [("cold start", arrived + quota + cold)] if cold else []
    phases += [("encode", encoded), ("queue", scheduled if has_run else finished)]
    if has_run:
        phases.append(("prefill", tokens[0] if tokens else finished))
    if tokens:
        phases += [("decode", tokens[-1]), ("stream", written)]
    return phases


_TEXT_COLUMNS = ("tenant", "klass", "finish_reason", "error")
_BEFORE_THE_FIRST_STEP = ("request_admission", "memory_adapter_load", "request_queue", "memory_blocked")


def _client(row: Row) -> tuple[Event, list[Event]]:
    due = int(row["due_ns"])
    sent, first, last = (_whole(row, name) for name in ("sent_ns", "first_token_ns", "last_byte_ns"))
    end = max(moment for moment in (due, sent, first, last) if moment is not None)
    phases = [(name, moment) for name, moment in (("lag", sent), ("to first token", first), ("to last byte", last))
              if moment is not None]  # fmt: skip
    arguments = {"status": row["status"], "output_tokens": _whole(row, "output_tokens"), "seen_by": "client alone"}
    return _slices(row["request_id"], "client", due, end, phases, arguments)


def _unfinished(steps: Iterable[Row], seen: set[str]) -> list[tuple[Event, list[Event]]]:
    """Requests that only the steps know: they have not ended yet, or their record is lost."""
    spans: dict[str, tuple[int, int]] = {}
    for row in steps:
        for request_id in map(call_of, _listed(row["request_ids"])):
            if request_id not in seen:
                begin, end = spans.get(request_id, (int(row["begin_ns"]), 0))
                spans[request_id] = min(begin, int(row["begin_ns"])), max(end, int(row["end_ns"]))
    return [_slices(name, "request", *span, [], {"unfinished": True}) for name, span in spans.items()]


def _slices(
    name: str, category: str, begin: int, end: int, phases: list[tuple[str, int]], arguments: Mapping[str, Any]
) -> tuple[Event, list[Event]]:
    """The whole, and its phases, each from the end of the one before; readings that contradict each other are cut."""
    end = max(begin, end)
    whole = {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": end - begin, "args": arguments}
    parts, at = [], begin
    for phase, until in phases:
        until = min(max(at, until), end)
        if until > at:
            parts.append({"ph": "X", "name": phase, "cat": category, "ts": at, "dur": until - at})
        at = until
    return whole, parts


# Steps


def _steps(steps: Iterable[Row]) -> Iterator[Event]:
    busy = _Busy()
    for row in sorted(steps, key=lambda row: row["step"]):
        name, begin = f"step {row['step']}", int(row["begin_ns"])
        predicted = {"predicted_ns": _whole(row, "predicted_ns")}
        yield _slice(ENGINE, _STEPS, name, "step", begin, int(row["end_ns"]) - begin, args=_composition(row))
        yield _slice(DEVICE, _BUSY, name, "device", busy.begin_ns(row), int(row["device_ns"]), args=predicted)


def _slice(process: int, track: int, name: str, category: str, begin: int, duration: int, **more: Any) -> Event:
    event = {"ph": "X", "pid": process, "tid": track, "name": name, "cat": category}
    return event | {"ts": begin, "dur": max(0, duration)} | more


class _Busy:
    """When the device began each step: so long after it was done with the one before, or after the loop awoke, as the
    gap says. The first step of a window has none before it: it was done when it was read."""

    def __init__(self) -> None:
        self._step: int | None = None
        self._ended = self._done = 0

    def begin_ns(self, row: Row) -> int:
        begin, device = int(row["begin_ns"]), int(row["device_ns"])
        if self._step is None or row["step"] != self._step + 1:
            read = begin + sum(_whole(row, f"stage_{stage}_ns") or 0 for stage in _UNTIL_READ)
            started = max(read - device, self._done)
        else:
            idle_since = begin if self._ended < begin else self._done
            started = idle_since + (_whole(row, "gap_ns") or 0)
        self._step, self._ended, self._done = row["step"], int(row["end_ns"]), started + device
        return started


_UNTIL_READ = STAGES[: STAGES.index("commit")]


def _composition(row: Row) -> dict[str, Any]:
    new, past = _listed(row["new_tokens"]), _listed(row["past_tokens"])
    kinds = list(_listed(row["kinds"]))
    return {
        "requests": list(_listed(row["request_ids"])),
        "new_tokens": int(sum(new)),
        "past_tokens": int(sum(past)),
        "kinds": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
        "padding_tokens": _whole(row, "padding_tokens"),
        "graph": row["graph"],
        "budget": _whole(row, "budget"),
        "refusals": dict(row["refusals"]) if row["refusals"] is not None else {},
        "flops": _whole(row, "flops"),
        "bytes": _whole(row, "bytes"),
    }


def _stages(steps: Iterable[Row]) -> Iterator[Event]:
    """One behind the other in the order of STAGES: with overlap those of several turns are drawn together."""
    for row in steps:
        at = int(row["begin_ns"])
        for stage in STAGES:
            duration = _whole(row, f"stage_{stage}_ns") or 0
            if duration > 0:
                yield _slice(ENGINE, _STEPS, stage, "stage", at, duration)
            at += duration


# Counters


def _counters(rows: TraceRows) -> Iterator[Event]:
    for row in rows.steps:
        ts = int(row["end_ns"])
        blocks = {state: _whole(row, f"blocks_{state}") for state in ("active", "reusable", "free")}
        for name, values in (
            ("KV blocks", blocks),
            ("waiting", {"requests": _whole(row, "waiting")}),
            ("running", {"requests": len(_listed(row["request_ids"]))}),
        ):
            yield {"ph": "C", "pid": COUNTERS, "tid": 0, "name": name, "ts": ts, "args": values}


_SENSORS = {
    "gpu_power_watts": "GPU power, W", "gpu_sm_clock_mhz": "SM clock, MHz", "cpu_power_watts": "CPU power, W",
    "front_cpu_percent": "front CPU, %", "core_cpu_percent": "core CPU, %",
    "host_steal_percent": "CPU steal, %",
}  # fmt: skip


def _system(system: Iterable[Row]) -> Iterator[Event]:
    for row, (column, name) in itertools.product(system, _SENSORS.items()):
        value = row.get(column)
        if value is not None and not math.isnan(value):
            args = {"value": float(value)}
            yield {"ph": "C", "pid": COUNTERS, "tid": 0, "name": name, "ts": int(row["ns"]), "args": args}


# Kernels


def _kernels(burst: Burst | None) -> Iterator[Event]:
    for run in burst.runs() if burst is not None else ():
        yield _slice(DEVICE, _KERNELS + run.track, run.name, run.klass, run.begin_ns, run.end_ns - run.begin_ns)


def _listed(value: Any) -> Sequence[Any]:
    """A list column, which is null where it was not recorded."""
    return () if value is None or isinstance(value, float) else value


def _whole(row: Row, name: str) -> int | None:
    """A whole number, which pandas may hold as a float, or None."""
    value = row.get(name)
    return None if value is None or value != value else int(value)  # NaN differs from itself


def _plain(value: np.generic | np.ndarray) -> Any:
    return value.tolist()
