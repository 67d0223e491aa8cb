"""The order of a device's work, which overlaps with the host where it can, and the threads of a CPU step."""

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from sojourn.engine.compute.linear import Linear
from sojourn.engine.token.models.decoder import Decoder
from sojourn.metrics.compute.cost_model import ModelShape

FEW_ROWS = (1, 2, 4)  # numbers of tokens whose steps are measured
WORTH = 1.2  # all threads must be this many times as fast: they also take cores from the other processes
TRIALS = 3
TRIED_BYTES = 1 << 28  # of weights, in each trial
KV_SHARE = 0.25  # of the weights' bytes: where a step reads more keys and values than that, all threads attend


@dataclass(slots=True)
class Task:
    """One step's work under way, and the device's times by the host's clock."""

    work: Callable[["Task"], None]
    begin_ns: int = 0
    forward_ns: int = 0  # the logits are ready
    end_ns: int = 0
    future: Future | None = None
    events: tuple[torch.cuda.Event, ...] = ()
    load_ns: int = 0  # KV blocks from host memory, before the forward pass
    store_ns: int = 0  # KV blocks to host memory, before the forward pass

    def forward_done(self) -> None:
        """Called by the work, between the logits and the sampling."""
        if self.events:
            self.events[1].record()
        else:
            self.forward_ns = time.monotonic_ns()


class InlineStream:
    """Runs tasks in their order: here on a CPU, in the host's own thread, when the host waits."""

    def submit(self, work: Callable[[Task], None]) -> Task:
        return Task(work)

    def wait(self, task: Task) -> None:
        """Until the task is done and has its times. Tasks are waited for in order."""
        _run(task)

    def drain(self) -> None:
        """Until the submitted tasks no longer read or write memory of the host. Here none does between two calls."""

    def call(self, work: Callable[[], None]) -> None:
        """Runs work that is no step, in the thread of the steps, after the submitted steps."""
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


def make_stream(device: torch.device, overlap: bool) -> InlineStream | ThreadStream | CudaStream:
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


@dataclass(frozen=True, slots=True)
class StepThreads:
    """One thread for steps of up to `alone` tokens, for which reading the weights is all the work."""

    most: int
    alone: int = 0
    kv_tokens: int = 0  # that such a step may see in all

    def take(self, num_tokens: int, seen_tokens: int) -> None:
        """Sets the calling thread's number of threads for a step."""
        few = num_tokens <= self.alone and seen_tokens <= self.kv_tokens
        wanted = 1 if few else self.most
        if torch.get_num_threads() != wanted:
            torch.set_num_threads(wanted)


def step_threads(model: Decoder, shape: ModelShape) -> StepThreads:
    """Measured on the matrices of the first layers: more than a cache holds, but few, because the start waits."""
    linears, tried = [], 0
    for module in model.modules():
        if isinstance(module, Linear) and tried < TRIED_BYTES:
            linears.append(module)
            tried += module.packed_bytes
    kv_tokens = int(KV_SHARE * shape.weight_bytes / shape.kv_bytes_per_token)
    return measured_threads(linears, [linear.in_features for linear in linears], kv_tokens, torch.get_num_threads())


@torch.inference_mode()
def measured_threads(
    products: Sequence[Callable[[torch.Tensor], torch.Tensor]],
    inputs: Sequence[int],
    kv_tokens: int,
    most: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> StepThreads:
    """Tries the matrix products of one step, of `inputs` features each, with one thread and with `most` in turns.

    Where one core uses nearly all memory bandwidth, the others only add the time that waking them takes.
    """
    if most == 1:
        return StepThreads(1)
    alone = 0
    for rows in FEW_ROWS:
        operands = {size: torch.randn(rows, size) for size in set(inputs)}
        durations_ns: dict[int, list[int]] = {1: [], most: []}
        for _ in range(TRIALS):
            for threads, times in durations_ns.items():
                torch.set_num_threads(threads)
                begin_ns = clock()
                for product, size in zip(products, inputs, strict=True):
                    product(operands[size])
                times.append(clock() - begin_ns)
        torch.set_num_threads(most)
        if statistics.median(durations_ns[1]) > WORTH * statistics.median(durations_ns[most]):
            break
        alone = rows
    return StepThreads(most, alone, kv_tokens)
