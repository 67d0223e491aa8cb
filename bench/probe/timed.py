"""The probe with a clock around each of its hooks, for `bench.probe.overhead`. Runs in vLLM's environment.

Each process writes a line to the file that SOJOURN_PROBE_TIMES names: hook → calls, and ns of its thread's
CPU. The clock itself is in it: some 0.3 µs a call.
"""

import json
import os
import time
from collections.abc import Callable
from typing import Any

from sojourn_probe.vllm_blocks import BlockProbe
from sojourn_probe.vllm_front import EngineClientProbe, Middleware
from sojourn_probe.vllm_scheduler import CoreProbe, scheduler_class
from sojourn_probe.writer import Writer

__all__ = ["Middleware"]
SPENT: dict[str, list[int]] = {}
HOOKS = (
    (CoreProbe, ("arrived", "turn", "launched", "planned", "updated")),
    (BlockProbe, ("allocated", "_store", "_remove")),
    (Writer, ("_flush",)),
)


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    spent = SPENT.setdefault(name, [0, 0])

    def clocked(*args: Any) -> Any:
        begin = time.thread_time_ns()
        try:
            return call(*args)
        finally:
            spent[0] += 1
            spent[1] += time.thread_time_ns() - begin

    return clocked


for owner, names in HOOKS:
    for each in names:
        setattr(owner, each, timed(f"{owner.__name__}.{each}", getattr(owner, each)))


def _outer(self: EngineClientProbe, engine_core_outputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Its own part of `_process_outputs`: all of it, less vLLM's."""
    inner, spent = self._process, SPENT.setdefault("EngineClientProbe._process_outputs", [0, 0])
    took = [0]

    def clocked(*given: Any, **named: Any) -> Any:
        begin = time.thread_time_ns()
        result = inner(*given, **named)
        took[0] = time.thread_time_ns() - begin
        return result

    self._process = clocked
    begin = time.thread_time_ns()
    try:
        return _process_outputs(self, engine_core_outputs, *args, **kwargs)
    finally:
        self._process = inner
        spent[0] += 1
        spent[1] += time.thread_time_ns() - begin - took[0]


_process_outputs = EngineClientProbe._process_outputs
EngineClientProbe._process_outputs = _outer  # type: ignore[method-assign]
Scheduler = scheduler_class()


def _flush(self: Writer) -> None:
    _write(self)
    with open(f"{os.environ['SOJOURN_PROBE_TIMES']}.{os.getpid()}", "w", encoding="utf-8") as file:
        json.dump(SPENT, file)


_write = Writer._flush
Writer._flush = _flush  # type: ignore[method-assign]
