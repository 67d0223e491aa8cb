"""The times of kernels: from torch's profiler, and for operations of a CPU that it cannot see.

On a GPU the profiler sees every kernel, also in replayed graphs. On a CPU our kernels are called by address, around
torch: during a burst their callers time each call.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler import profile, record_function  # torch.profiler around it imports a compiler: seconds

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.layers_cpp import PARTS, CppLayers
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.operations.backend import Operations
from sojourn.metrics.compute.kernels import Kernel, Offset, align, apart, kernel_class, outermost

MARK = "sojourn::mark"
MARKS = 8  # at each end of a burst

# Operation of a layer → class and name of what it computes
_OPERATIONS = {
    "norm": ("norm", "norm"),
    "add_norm": ("norm", "add norm"),
    "gate": ("other", "gate"),
    "write_heads": ("rope_kv", "rope and cache write"),
    "write": ("rope_kv", "cache write"),
    "mixture": ("gemm", "experts"),
}


class TorchProfiler:
    """One burst of torch's profiler. `start`, `mark` and `stop` are called in the thread that computes."""

    def __init__(self, device: torch.device):
        self._on_cuda = device.type == "cuda"
        self._profile = profile(use_kineto=True, use_device="cuda" if self._on_cuda else None)
        self._read_around: list[tuple[int, int]] = []  # monotonic, of each mark
        self._marks: list[tuple[int, int]] = []  # by the profiler's clock

    def start(self) -> None:
        self._profile.__enter__()
        self._mark()

    def stop(self) -> None:
        self._mark()
        self._profile.__exit__(None, None, None)

    def events(self) -> Iterator[Kernel | None]:
        """What ran on the device, by the profiler's own clock; None for anything else, so that the reader can pause."""
        for event in self._profile.kineto_results.events():
            # Kineto's name of an activity has a binding from torch 2.12 on: the device and the flag are older.
            on_cuda, name = event.device_type() == DeviceType.CUDA, event.name()
            if event.is_user_annotation():  # on a GPU the marks are there a second time
                if name == MARK and not on_cuda:
                    self._marks.append((event.start_ns(), event.end_ns()))
                yield None
            elif on_cuda is self._on_cuda:
                track = event.device_resource_id() if on_cuda else 0
                yield Kernel(name, kernel_class(name), event.start_ns(), event.end_ns(), track)
            else:
                yield None

    def offset(self) -> Offset:
        """Of the profiler's clock, once all events are read."""
        around = zip(self._read_around, sorted(self._marks), strict=True)
        return align((before, begin, end, after) for (before, after), (begin, end) in around)

    def _mark(self) -> None:
        for _ in range(MARKS):
            before = time.monotonic_ns()
            with record_function(MARK):
                pass
            self._read_around.append((before, time.monotonic_ns()))


class CpuSpans:
    """When a CPU computed what, by the host's clock: while they are installed, the owners' methods are timed."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self._replaced: list[tuple[Any, str, Any]] = []  # owner, name, and what the owner itself had there
        self._watched: CppLayers | None = None

    def install(
        self, model: torch.nn.Module, operations: Operations, attention: AttentionBackend, joined: CppLayers | None
    ) -> None:
        """`joined` are the layers that are computed in one call, if they are."""
        for name, kernel in _OPERATIONS.items():
            self._time(operations, name, kernel)
        # By class: expanded latents are attended by backends of their own (engine/token/models/expansion.py).
        for owner in (type(attention), *((attention,) if "attend" in vars(attention) else ())):
            self._time(owner, "attend", ("attention", "attend"))
        for path, module in model.named_modules():
            if isinstance(module, Linear):
                self._time(module, "forward", ("gemm", path.rpartition(".")[2]))
        if joined is not None:
            joined.watch = self._take_marks
            self._watched = joined

    def remove(self) -> None:
        for owner, name, own in self._replaced:
            if own is None:
                delattr(owner, name)  # the class's method is seen again
            else:
                setattr(owner, name, own)
        self._replaced.clear()
        if self._watched is not None:
            self._watched.watch = self._watched = None

    def _time(self, owner: Any, name: str, kernel: tuple[str, str]) -> None:
        self._replaced.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, self._timed(getattr(owner, name), *kernel))

    def _timed(self, work: Callable, klass: str, name: str) -> Callable:
        kernels, clock = self.kernels, time.monotonic_ns

        def timed(*arguments: Any, **options: Any) -> Any:
            begin_ns = clock()
            result = work(*arguments, **options)
            kernels.append(Kernel(name, klass, begin_ns, clock()))
            return result

        return timed

    def _take_marks(self, marks: Sequence[int]) -> None:
        for number, (begin_ns, end_ns) in enumerate(pairwise(marks)):
            klass, name = PARTS[number % len(PARTS)]
            self.kernels.append(Kernel(name, klass, begin_ns, end_ns))


def on_monotonic(kernels: Sequence[Kernel], offset: Offset) -> list[Kernel]:
    return [run._replace(begin_ns=run.begin_ns - offset.ns, end_ns=run.end_ns - offset.ns) for run in kernels]


def with_spans(spans: Sequence[Kernel], operations: Sequence[Kernel]) -> list[Kernel]:
    """The timed calls, and of torch's operations those outside them, each by the one that was called first: all that a
    CPU computed, sorted by begin."""
    kernels = [*spans, *apart(outermost(operations), outermost(spans))]
    return sorted(kernels, key=lambda run: (run.begin_ns, -run.end_ns))
