"""One profile burst in the core: from the request of the front to the answer, between the turns of the loop."""

import time
import traceback
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec

from sojourn.engine.compute.profiler import CpuSpans, TorchProfiler, on_monotonic, with_spans
from sojourn.engine.loop.engine import Engine
from sojourn.engine.messages import Profile
from sojourn.engine.request.plan import LaunchedStep, StepOutcome, StepPlan
from sojourn.metrics.compute.kernels import Burst, Kernel, Packing, StepWindow, classed, kernel_records, within
from sojourn.metrics.records import KernelRecord

_begin = attrgetter("begin_ns")
READ_AT_ONCE = 1_000  # events between two turns
STEPS_AT_ONCE = 5  # steps between two turns: some milliseconds
DIFFERENCES = {  # how a profiled step differs, by the type of device
    "cpu": "each operation takes two readings of the clock, and torch's profiler notes each of torch's: the kernels "
    "are those of any step",
    "cuda": "torch's profiler has every kernel timed by the driver and notes each launch: the kernels, and the graphs "
    "that are replayed, are those of any step, but gaps are longer where the host launches kernels one by one",
}


class ProfileBurst:
    """Profiles the next steps of an engine. `advance` is called before each step, and gives the answer once.

    The loop stands still while the profiler is started and stopped; what it noted is read in pieces between turns.
    """

    def __init__(self, wish: Profile, engine: Engine, clock_ns: Callable[[], int] = time.monotonic_ns):
        self._engine, self._clock_ns = engine, clock_ns
        self._runner = engine.runner
        self._device_type = engine.runner.inner.placed.device.type
        self._steps = wish.steps
        self._deadline_ns = clock_ns() + wish.timeout_ms * 1_000_000
        self._profiler = TorchProfiler(engine.runner.inner.placed.device)
        self._spans = CpuSpans()
        self._packing = Packing()
        self._launched: list[LaunchedStep] = []  # steps to profile that were not read yet
        self._left = wish.steps  # to launch
        self._windows: list[StepWindow] = []
        self._blocked_ns = {"start": 0, "stop": 0, "read": 0}
        self._reading: Iterator[Burst | None] | None = None
        self._has_started = self._is_watching = False

    def advance(self) -> Burst | None:
        """None while the burst goes on. Its answer has no windows where no step ended before the deadline, and a
        `failure` where the profiler failed: that is no reason to end the process."""
        try:
            return self._advance()
        except Exception as error:
            traceback.print_exc()
            self._leave()
            return msgspec.structs.replace(self._answer([], 0), failure=f"{type(error).__name__}: {error}")

    def _advance(self) -> Burst | None:
        if self._reading is not None:
            return self._timed("read", lambda: next(self._reading))
        late = self._clock_ns() >= self._deadline_ns
        if not self._has_started:
            if self._engine.has_work:
                self._timed("start", self._start)
            elif late:
                return self._answer([], 0)
        elif late or len(self._windows) == self._steps:
            self._timed("stop", self._stop)
        return None

    def _timed(self, phase: str, work: Callable[[], Any]) -> Any:
        begin_ns = self._clock_ns()
        done = work()
        self._blocked_ns[phase] += self._clock_ns() - begin_ns
        return done

    def _start(self) -> None:
        self._has_started = True
        eager = self._runner.inner.eager
        if self._device_type == "cpu":
            joined = eager.model.joined(eager.operations, eager.attention, eager.kv_cache)
            self._spans.install(eager.model, eager.operations, eager.attention, joined)
        self._runner.launch, self._runner.collect = self._launch, self._collect
        self._is_watching = True
        self._runner.inner.stream.call(self._profiler.start)

    def _stop(self) -> None:
        self._runner.inner.stream.call(self._profiler.stop)
        self._leave()
        self._reading = self._read()

    def _leave(self) -> None:
        """Gives the runner its own methods again."""
        if self._is_watching:
            self._is_watching = False
            del self._runner.launch, self._runner.collect
            self._spans.remove()

    def _launch(self, plan: StepPlan) -> LaunchedStep:
        step = type(self._runner).launch(self._runner, plan)
        if self._left:
            self._left -= 1
            self._launched.append(step)
        return step

    def _collect(self, step: LaunchedStep) -> StepOutcome:
        outcome = type(self._runner).collect(self._runner, step)
        if self._launched and self._launched[0] is step:
            self._launched.pop(0)
            self._windows.append(
                StepWindow(
                    self._engine.step_number,
                    outcome.device_begin_ns,
                    outcome.device_end_ns - outcome.sampling_ns,
                    outcome.device_end_ns,
                )
            )
        return outcome

    def _read(self) -> Iterator[Burst | None]:
        """In pieces: None after each."""
        events, seen, kernels = self._profiler.events(), [], []
        while piece := list(islice(events, READ_AT_ONCE)):
            seen += [event for event in piece if event is not None]
            yield None
        offset = self._profiler.offset()
        for first in range(0, len(seen), READ_AT_ONCE):
            kernels += on_monotonic(seen[first : first + READ_AT_ONCE], offset)
            yield None
        kernels.sort(key=_begin)
        spans = sorted(self._spans.kernels, key=_begin)
        records: list[KernelRecord] = []
        for windows, until_ns in _pieces(self._windows):
            since_ns = windows[0].begin_ns if windows[0] is not self._windows[0] else 0
            part = self._computed(_between(kernels, since_ns, until_ns), _between(spans, since_ns, until_ns), windows)
            part = classed(part, windows, offset.error_ns)
            records += kernel_records(part, windows, until_ns)
            self._packing.add(part)
            yield None
        yield self._answer(records, offset.error_ns)

    def _computed(self, kernels: list[Kernel], spans: list[Kernel], windows: Sequence[StepWindow]) -> list[Kernel]:
        """The device's part of the kernels: on a CPU the profiler also sees the host's preparation."""
        if self._device_type == "cpu":
            sampling = [Kernel("draw", "sampling", window.forward_ns, window.end_ns) for window in windows]
            kernels = with_spans(spans, within(kernels, windows)) + sampling
        return sorted(kernels, key=lambda run: (run.begin_ns, -run.end_ns))

    def _answer(self, records: list[KernelRecord], error_ns: int) -> Burst:
        return Burst(
            windows=self._windows,
            records=records,
            names=self._packing.names,
            kernels=self._packing.kernels,
            dropped=self._packing.dropped,
            clock_error_ns=error_ns,
            blocked_ns=self._blocked_ns,
            device=self._device_type,
            differs=DIFFERENCES[self._device_type],
        )


def _pieces(windows: Sequence[StepWindow]) -> Iterator[tuple[Sequence[StepWindow], int | None]]:
    """A few steps at a time, and when the next begin."""
    for first in range(0, len(windows), STEPS_AT_ONCE):
        rest = windows[first + STEPS_AT_ONCE :][:1]
        yield windows[first : first + STEPS_AT_ONCE], rest[0].begin_ns if rest else None


def _between(kernels: list[Kernel], begin_ns: int, end_ns: int | None) -> list[Kernel]:
    """Those that began then, of kernels in the order of their begin."""
    first = bisect_left(kernels, begin_ns, key=_begin)
    return kernels[first : None if end_ns is None else bisect_left(kernels, end_ns, key=_begin)]
