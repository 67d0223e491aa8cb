"""The order of a device's work, which overlaps with the host where it can."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(slots=True)
class Task:
    """One step's work under way, and the device's times by the host's clock."""

    work: Callable[["Task"], None]
    begin_ns: int = 0
    forward_ns: int = 0  # the logits are ready
    end_ns: int = 0
    future: Future | None = None
    events: tuple[torch.cuda.Event, ...] = ()

    def forward_done(self) -> None:
        """Called by the work, between the logits and the sampling."""
        if self.events:
            self.events[1].record()
        else:
            self.forward_ns = time.monotonic_ns()


class Stream(Protocol):
    """Runs tasks in their order."""

    def submit(self, work: Callable[[Task], None]) -> Task: ...

    def wait(self, task: Task) -> None:
        """Until it is done and has its times. Tasks are waited for in order."""
        ...

    def drain(self) -> None:
        """Until the submitted tasks no longer read or write memory of the host."""
        ...

    def call(self, work: Callable[[], None]) -> None:
        """Runs work that is no step, in the thread of the steps, after those that were submitted."""
        ...


class InlineStream:
    """A CPU that computes in the host's own thread, when the host waits."""

    def submit(self, work: Callable[[Task], None]) -> Task:
        return Task(work)

    def wait(self, task: Task) -> None:
        _run(task)

    def drain(self) -> None:
        """Nothing is under way when the host does anything else."""

    def call(self, work: Callable[[], None]) -> None:
        work()


class ThreadStream:
    """A CPU that computes in a thread of its own: torch and our kernels leave the interpreter to the host."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._last: Future | None = None

    def submit(self, work: Callable[[Task], None]) -> Task:
        task = Task(work)
        self._last = task.future = self._worker.submit(_run, task)
        return task

    def wait(self, task: Task) -> None:
        task.future.result()

    def drain(self) -> None:
        if self._last is not None:
            self._last.exception()  # waits; `collect` raises it

    def call(self, work: Callable[[], None]) -> None:
        self._worker.submit(work).result()


class CudaStream:
    """The device's own stream. Its clock is chained to the host's: each event stands as long after the one before as
    the device says, and never later than the host saw it."""

    RESTART_NS = 1_000_000_000  # the device measures longer times too coarsely

    def __init__(self) -> None:
        self._last: tuple[torch.cuda.Event, int] | None = None  # the last step's end, and when that was

    def submit(self, work: Callable[[Task], None]) -> Task:
        task = Task(work, events=tuple(torch.cuda.Event(enable_timing=True) for _ in range(3)))
        submitted_ns = time.monotonic_ns()
        task.events[0].record()
        work(task)
        task.events[2].record()
        task.begin_ns = submitted_ns  # not before
        return task

    def wait(self, task: Task) -> None:
        begin, forward, end = task.events
        end.synchronize()
        seen_ns = task.end_ns = time.monotonic_ns()
        if self._last is not None and seen_ns - self._last[1] < self.RESTART_NS:
            task.end_ns = min(seen_ns, self._last[1] + _elapsed_ns(self._last[0], end))
        not_before = max(task.begin_ns, self._last[1] if self._last is not None else 0)
        task.end_ns = max(task.end_ns, not_before)
        task.begin_ns = max(not_before, task.end_ns - _elapsed_ns(begin, end))
        task.forward_ns = max(task.begin_ns, task.end_ns - _elapsed_ns(forward, end))
        self._last = (end, task.end_ns)

    def drain(self) -> None:
        """The host's changes of device memory queue behind what was submitted."""

    def call(self, work: Callable[[], None]) -> None:
        work()  # in the thread that launches; the device may be behind it


def make_stream(device: torch.device, overlap: bool) -> Stream:
    if device.type == "cuda":
        return CudaStream()
    return ThreadStream() if overlap else InlineStream()


def _run(task: Task) -> None:
    task.begin_ns = time.monotonic_ns()
    with torch.inference_mode():
        task.work(task)
    task.end_ns = time.monotonic_ns()


def _elapsed_ns(begin: torch.cuda.Event, end: torch.cuda.Event) -> int:
    return round(begin.elapsed_time(end) * 1e6)
