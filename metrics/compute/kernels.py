"""Kernels of a profile burst: what class a name belongs to, whose time is whose, and one clock for all of them.

A *kernel* is what a device ran without interruption and under one name: a CUDA kernel, a copy, or an operation of a
CPU. Pure functions over what a profiler told.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from sojourn.metrics.records import KernelRecord

# `gap`: the device had nothing to do. Over a burst the classes sum to its wall time.
CLASSES = ("attention", "gemm", "norm", "rope_kv", "sampling", "communication", "copy", "other", "gap")
WITHIN, BETWEEN = "within a step", "between steps"  # names of the two gaps

# The first pattern in a name, template arguments included, gives the class. Cache writes stand before
# attention, which names of theirs mention; attention before products, whose libraries its kernels are built from.
_CLASSES = tuple(
    (klass, re.compile(pattern, re.IGNORECASE))
    for klass, pattern in (
        ("communication", r"nccl|nvshmem|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce"),
        ("copy", r"^mem(cpy|set)\b|direct_copy_kernel|^aten::(copy_|_to_copy|to|clone|contiguous)$"),
        ("rope_kv", r"^heads_kernel|^write_kernel|rotary|\brope|_rope|(reshape|concat)_and_cache"),
        ("attention", r"^attend_kernel|^plan_kernel|flash|fmha|sdpa|attention|"
                      r"paged_?kv|\bmla_|scaled_dot_product"),
        ("norm", r"^norm_kernel|^add_norm_kernel|layer_?norm|rms_?norm"),
        ("sampling", r"^(chunk|draw|edit)_kernel|multinomial|top_?[kp]_(sampling|mask|renorm)|sampling"),
        ("gemm", r"^(gate_up|down|shrink|expand|(gated|quantised|int8)_product)_kernel|gemm|gemv|xmma|"
                 r"cutlass|cublas|nvjet|splitk|"
                 r"\bdot_kernel|reduce_1block_kernel|marlin|^aten::(linear|addmm|mm|bmm|matmul|baddbmm|_grouped_mm)$"),
    )
)  # fmt: skip


def kernel_class(name: str) -> str:
    """The class of a kernel by its name; `other` for a name without a pattern, such as torch's elementwise kernels."""
    return next((klass for klass, pattern in _CLASSES if pattern.search(name)), "other")


class Kernel(NamedTuple):
    """One run of a kernel, on the monotonic clock."""

    name: str
    klass: str
    begin_ns: int
    end_ns: int
    track: int = 0  # stream of the device


class StepWindow(msgspec.Struct, frozen=True, array_like=True):
    """What the device did for one step, on the monotonic clock."""

    step: int
    begin_ns: int
    forward_ns: int  # the logits were there: what follows is sampling
    end_ns: int


class Burst(msgspec.Struct, frozen=True):
    """A profile burst as the core tells it. `kernels` holds the first MAX_TRACED of them, for a trace; `records` is
    made of all."""

    windows: list[StepWindow]  # of the steps that were profiled, in order
    records: list[KernelRecord]
    names: list[tuple[str, str]]  # names and classes, by the number that `kernels` has for them
    kernels: bytes  # int64 [n, 4]: number of the name, begin_ns, end_ns, track
    dropped: int  # kernels beyond those
    clock_error_ns: int  # of begin and end, against the readings of the host
    blocked_ns: dict[str, int]  # for how long the loop stood still: start, stop, read
    device: str
    differs: str  # a sentence: what a profiled step does that others do not
    failure: str | None = None  # why the profiler gave nothing

    def runs(self) -> Iterator[Kernel]:
        for name, begin_ns, end_ns, track in np.frombuffer(self.kernels, dtype=np.int64).reshape(-1, 4).tolist():
            yield Kernel(*self.names[name], begin_ns, end_ns, track)

    @property
    def traced(self) -> int:
        """How many runs `kernels` holds."""
        return len(self.kernels) // (4 * np.dtype(np.int64).itemsize)

    @property
    def window_ns(self) -> int:
        """From the first step's begin to the last one's end, on the device."""
        return self.windows[-1].end_ns - self.windows[0].begin_ns if self.windows else 0


MAX_TRACED = 200_000  # kernels of one burst: 6.4 MB on their way, and some 20 MB of trace


class Packing:
    """`names`, `kernels` and `dropped` of a Burst, a part at a time."""

    def __init__(self) -> None:
        self.dropped = 0
        self._numbers: dict[tuple[str, str], int] = {}
        self._parts: list[bytes] = []
        self._room = MAX_TRACED

    def add(self, kernels: Sequence[Kernel]) -> None:
        numbers, selected = self._numbers, kernels[: self._room]
        rows = [
            (numbers.setdefault((run.name, run.klass), len(numbers)), run.begin_ns, run.end_ns, run.track)
            for run in selected
        ]
        self._parts.append(np.array(rows, dtype=np.int64).tobytes())
        self._room -= len(selected)
        self.dropped += len(kernels) - len(selected)

    @property
    def names(self) -> list[tuple[str, str]]:
        return list(self._numbers)

    @property
    def kernels(self) -> bytes:
        return b"".join(self._parts)


class Offset(NamedTuple):
    """What to take off a clock's readings to get monotonic ones, and by how much that may be wrong."""

    ns: int
    error_ns: int


def align(marks: Iterable[tuple[int, int, int, int]]) -> Offset:
    """The offset of a profiler's clock, from marks (monotonic before, its begin, its end, monotonic after), in ns.

    Each mark's begin and end lie between the two readings around it, which bounds the offset from both sides (Cristian,
    1989); the bounds of all marks together are tighter. Where they contradict each other the clocks drifted, by as much
    as is then told as the error. Raises ValueError without a mark.
    """
    bounds = [(end - after, begin - before) for before, begin, end, after in marks]
    if not bounds:
        raise ValueError("a clock without a mark has no known offset")
    low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
    return Offset((low + high) // 2, (abs(high - low) + 1) // 2)


def outermost(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Those that no other encloses, in order of their begin: of nested operations the one that was called first."""
    found: list[Kernel] = []
    for run in sorted(kernels, key=lambda run: (run.begin_ns, -run.end_ns)):
        if not found or run.begin_ns >= found[-1].end_ns:
            found.append(run)
    return found


def apart(kernels: Sequence[Kernel], spans: Sequence[Kernel]) -> list[Kernel]:
    """The kernels whose middle lies in none of the `spans`, cut to what lies outside them: two clocks tell of them.
    Neither may overlap among themselves; both are sorted."""
    begins = [span.begin_ns for span in spans]
    found = []
    for run in kernels:
        middle = (run.begin_ns + run.end_ns) // 2
        place = bisect_right(begins, middle)  # of the next span
        begin_ns = max(run.begin_ns, spans[place - 1].end_ns) if place else run.begin_ns
        if begin_ns <= middle:
            end_ns = min(run.end_ns, begins[place]) if place < len(begins) else run.end_ns
            found.append(run._replace(begin_ns=begin_ns, end_ns=end_ns))
    return found


def within(kernels: Iterable[Kernel], windows: Sequence[StepWindow]) -> list[Kernel]:
    """The kernels whose middle lies in one of the windows, cut to the forward pass or the draws that it lies in: two
    clocks tell of them."""
    parts = [part for w in windows for part in ((w.begin_ns, w.forward_ns), (w.forward_ns, w.end_ns))]
    begins = [begin_ns for begin_ns, _ in parts]
    inside = []
    for run in kernels:
        middle = (run.begin_ns + run.end_ns) // 2
        place = bisect_right(begins, middle) - 1
        if place >= 0 and middle < parts[place][1]:
            begin_ns, end_ns = parts[place]
            inside.append(run._replace(begin_ns=max(run.begin_ns, begin_ns), end_ns=min(run.end_ns, end_ns)))
    return inside


def classed(kernels: Iterable[Kernel], windows: Sequence[StepWindow], error_ns: int) -> list[Kernel]:
    """What a name does not tell, the place may: after the logits a step samples."""
    begins = [window.begin_ns for window in windows]
    result = []
    for run in kernels:
        place = bisect_right(begins, run.begin_ns) - 1
        after = place >= 0 and windows[place].forward_ns - error_ns <= run.begin_ns < windows[place].end_ns
        result.append(run._replace(klass="sampling") if run.klass == "other" and after else run)
    return result


def segments(kernels: Sequence[Kernel]) -> Iterator[tuple[int, int, int]]:
    """(place of the kernel, begin_ns, end_ns) of stretches that do not overlap, in order, of kernels sorted by begin.

    Where several run, the time is that of the one that began last: of nested ones the innermost.
    """
    running: list[int] = []
    cursor = 0

    def close(until_ns: int) -> Iterator[tuple[int, int, int]]:
        nonlocal cursor
        while running:
            place = running[-1]
            end_ns = min(kernels[place].end_ns, until_ns)
            if end_ns > cursor:
                yield place, cursor, end_ns
                cursor = end_ns
            if kernels[place].end_ns > until_ns:
                return
            running.pop()

    for place, run in enumerate(kernels):
        yield from close(run.begin_ns)
        cursor = max(cursor, run.begin_ns)
        running.append(place)
    yield from close(max((run.end_ns for run in kernels), default=0))


def kernel_records(
    kernels: Sequence[Kernel], windows: Sequence[StepWindow], until_ns: int | None = None
) -> list[KernelRecord]:
    """Rows of the table `kernels`: by step, class and name. They sum to the time from the first step's begin to the
    last one's end, or to `until_ns`, if that is later.

    `kernels` are sorted by begin. What runs between two steps is the earlier one's; time in which nothing runs is
    `gap`, within a step or between two. Time outside the burst is left out.
    """
    if not windows:
        return []
    # Alternately within a step and between two: [begin, end) of step 0, [end, begin of step 1), …
    bounds = [moment for window in windows for moment in (window.begin_ns, window.end_ns)]
    if until_ns is not None and until_ns > bounds[-1]:
        bounds.append(until_ns)
    idle = [after - before for before, after in pairwise(bounds)]
    sums: dict[tuple[int, str, str], list[int]] = {}  # (step, class, name) → count, total, begin
    started: set[int] = set()
    at = 0
    for place, begin_ns, end_ns in segments(kernels):
        begin_ns = max(begin_ns, bounds[0])
        while begin_ns < end_ns and begin_ns < bounds[-1]:
            while bounds[at + 1] <= begin_ns:
                at += 1
            until_ns = min(end_ns, bounds[at + 1])
            idle[at] -= until_ns - begin_ns
            run = kernels[place]
            booked = sums.setdefault((windows[at // 2].step, run.klass, run.name), [0, 0, begin_ns])
            if place not in started:
                started.add(place)
                booked[0] += 1
            booked[1] += until_ns - begin_ns
            begin_ns = until_ns
    rows = [KernelRecord(step, klass, name, *booked) for (step, klass, name), booked in sums.items()]
    rows += [
        KernelRecord(windows[at // 2].step, "gap", BETWEEN if at % 2 else WITHIN, 1, gap_ns, bounds[at])
        for at, gap_ns in enumerate(idle)
        if gap_ns
    ]
    return sorted(rows, key=lambda row: (row.step, row.begin_ns))


def by_class(records: Iterable[KernelRecord]) -> dict[str, int]:
    """Nanoseconds of each class, all of CLASSES: they sum to the wall time of the burst."""
    sums = dict.fromkeys(CLASSES, 0)
    for record in records:
        sums[record.klass] += record.total_ns
    return sums


class KernelSum(msgspec.Struct, frozen=True):
    """All runs of the kernels of one name."""

    name: str
    klass: str
    count: int
    total_ns: int


def by_name(records: Iterable[KernelRecord]) -> list[KernelSum]:
    """The longest first."""
    counts: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    for record in records:
        counts[record.name, record.klass] += record.count
        times[record.name, record.klass] += record.total_ns
    return [KernelSum(*key, counts[key], total_ns) for key, total_ns in times.most_common()]
