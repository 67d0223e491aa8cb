"""The probe, switched on and off while the server runs, for `bench.probe.overhead`. Runs in vLLM's environment.

The engine's loop counts steps. After WINDOW_STEPS of them it begins a window of the other kind, in the order on, off,
off, on. Both processes write a line for each window to a file of their own, whose beginning SOJOURN_PROBE_TIMES names:
whether the probe was on, ns of wall time and of the process's CPU, steps, tokens that were given, and tokens that
were scheduled, with prompts. The counting is in both kinds.
"""

import json
import mmap
import os
import time
from pathlib import Path
from typing import IO, Any

from sojourn_probe import process_times, vllm_front, vllm_scheduler

WINDOW_STEPS = 50
ORDER = (True, False, False, True)


class Switch:
    """A byte that the processes of one server share: whether the probe is on. Each process logs its own windows."""

    def __init__(self, role: str):
        begin = os.environ["SOJOURN_PROBE_TIMES"]
        path = Path(f"{begin}.switch")
        if not path.exists():
            path.write_bytes(b"\x01")
        with path.open("r+b") as file:
            self._byte = mmap.mmap(file.fileno(), 1)
        self._log: IO[str] = open(f"{begin}.{role}.{os.getpid()}", "w", encoding="utf-8", buffering=1)  # noqa: SIM115
        self.steps = self.tokens = self.scheduled = 0
        self._wall_ns, self._cpu_ns, self._logged = time.monotonic_ns(), time.process_time_ns(), self.is_on

    @property
    def is_on(self) -> bool:
        return self._byte[0] == 1

    def turn(self, on: bool) -> None:
        self._byte[0] = 1 if on else 0

    def end_window(self) -> None:
        """Logs what was spent since the last call."""
        wall_ns, cpu_ns = time.monotonic_ns(), time.process_time_ns()
        spent = {"on": self._logged, "wall_ns": wall_ns - self._wall_ns, "cpu_ns": cpu_ns - self._cpu_ns,
                 "steps": self.steps, "tokens": self.tokens, "scheduled": self.scheduled}  # fmt: skip
        self._log.write(json.dumps(spent) + "\n")
        self.steps = self.tokens = self.scheduled = 0
        self._wall_ns, self._cpu_ns, self._logged = wall_ns, cpu_ns, self.is_on


_switch: Switch | None = None


def switch(role: str) -> Switch:
    global _switch
    if _switch is None:
        _switch = Switch(role)
    return _switch


_sample = process_times.sample
process_times.sample = lambda *args: _sample(*args) if _switch is not None and _switch.is_on else None


def _switched(base: type) -> type:
    """The recorded scheduler, whose record each window begins or ends."""

    class Switched(base):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._kept, self._windows, self._switch = self._probe, 0, switch("core")
            manager = self.kv_cache_manager
            self._hooks = [(manager, "allocate_slots", manager.allocate_slots),
                           (self, "_preempt_request", self._preempt_request)]  # fmt: skip

        def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            result = super().update_from_output(scheduler_output, *args, **kwargs)
            counted = self._switch
            counted.steps += 1
            counted.scheduled += scheduler_output.total_num_scheduled_tokens
            counted.tokens += sum(len(each.new_token_ids) for outputs in result.values() for each in outputs.outputs)
            if counted.steps >= WINDOW_STEPS:
                self._windows += 1
                self._turn(ORDER[self._windows % len(ORDER)])
            return result

        def _turn(self, on: bool) -> None:
            self._switch.turn(on)
            self._switch.end_window()
            self._probe = self._kept if on else None
            for owner, name, hook in self._hooks:
                if on:
                    setattr(owner, name, hook)
                else:
                    owner.__dict__.pop(name, None)

    return Switched


class Middleware(vllm_front.Middleware):
    """The probe's middleware, asked anew at each call whether the probe is on."""

    def __init__(self, app: Any):
        super().__init__(app)
        self._switch, self._was_on, self._plain = switch("front"), True, app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await (super().__call__ if self._is_on() else self._plain)(scope, receive, send)

    def _is_on(self) -> bool:
        on = self._switch.is_on
        if on != self._was_on:
            self._was_on = on
            self._switch.end_window()
        return on

    def _attach(self, scope: Any) -> None:
        super()._attach(scope)
        if self._client is None:
            return
        for plain in (self._client._add, self._client._process):
            owner, name = plain.__self__, plain.__name__
            setattr(owner, name, self._chosen(getattr(owner, name), plain))

    def _chosen(self, recorded: Any, plain: Any) -> Any:
        return lambda *args, **kwargs: (recorded if self._is_on() else plain)(*args, **kwargs)


_recorded = vllm_scheduler._recorded
vllm_scheduler._recorded = lambda base: _switched(_recorded(base))


def __getattr__(name: str) -> type:
    """As in the probe: only the process of the engine's loop needs vLLM's own class."""
    if name != "Scheduler":
        raise AttributeError(name)
    globals()["Scheduler"] = made = vllm_scheduler.scheduler_class()
    return made
