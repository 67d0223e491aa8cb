"""Keeps the blocks that the miss-ratio curve of their class says are worth their room.

Blocks are classed by how many requests have found them, and by how far from the beginning of their prompt they stand.
For each class the policy measures after which age idle blocks are used again. That gives the curve of hits over room
that this class would have (Denning, *Working sets past and present*, 1980): to keep its blocks until age T gives
F(T) hits a block, and costs the integral of 1 - F of room and time. The slope of that curve's concave hull at a block's
age is the hits that a unit of room buys there, at best. The block with the smallest slope goes first. This is hit
density (Beckmann, Chen, Cidon, *LHD*, NSDI 2018) with the best horizon in place of the observed one, which is Gittins'
index of a reuse time. That classes of KV blocks have stable reuse times, and that the position matters, is the finding
of Wang et al. (*KVCache Cache in the Wild*, USENIX ATC 2025).

Ages are counted in blocks that became idle. Evicted blocks are remembered, as GHOSTS pools, so that a reuse that comes
after the eviction is measured, too. A class with few samples borrows from all classes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from sojourn.engine.memory.cached_block import CachedBlock
from sojourn.engine.memory.eviction.policy import EvictionPolicy

USE_CLASSES, DEPTH_CLASSES = 4, 4
GHOSTS = 4  # pools of evicted blocks that are remembered
BINS_PER_OCTAVE = 2
NUM_BINS = 64
BORROWED = 32.0  # samples of all classes that a class starts with
FORGET = 0.9  # what stays of old samples at each learning
LEARN_EVERY = 1024  # samples


class Worth(EvictionPolicy):
    """A queue for each class of blocks. Its head is the oldest leaf of the class."""

    name: ClassVar[str] = "worth"
    counts_uses: ClassVar[bool] = True

    def __init__(self, num_blocks: int):
        self.num_queues = USE_CLASSES * DEPTH_CLASSES
        self._max_ghosts = GHOSTS * num_blocks
        self._ghosts: OrderedDict[bytes, tuple[int, int]] = OrderedDict()  # key → queue, idle since
        self._reuses = [[0.0] * NUM_BINS for _ in range(self.num_queues)]  # by age
        self._unused = [0.0] * self.num_queues  # blocks that were forgotten without a reuse
        self._worth: list[list[float]] = []  # by queue and age; empty until something was learnt
        self._samples = 0

    def became_idle(self, block: CachedBlock, now: int) -> Sequence[CachedBlock]:
        uses = min(block.uses.bit_length(), USE_CLASSES - 1)
        depth = min(block.depth.bit_length() // 2, DEPTH_CLASSES - 1)
        block.queue = uses * DEPTH_CLASSES + depth
        return ()

    def used(self, block: CachedBlock, age: int) -> None:
        self._reused(block.queue, age)
        block.uses += 1

    def inserted(self, block: CachedBlock, now: int) -> None:
        ghost = self._ghosts.pop(block.key, None)
        if ghost is not None:
            queue, idle_since = ghost
            self._reused(queue, now - idle_since)
            block.uses = queue // DEPTH_CLASSES + 1  # at least: what a class knows of it

    def evicted(self, block: CachedBlock, now: int) -> None:
        self._ghosts[block.key] = (block.queue, block.idle_since or 0)
        if len(self._ghosts) > self._max_ghosts:
            _, (queue, _) = self._ghosts.popitem(last=False)
            self._unused[queue] += 1
            self._sampled()

    def victim_queue(self, heads: Sequence[CachedBlock | None], now: int) -> int:
        best, least = -1, (0.0, 0)
        for queue, head in enumerate(heads):
            if head is None:
                continue
            age = now - (head.idle_since or 0)
            worth = self._worth[queue][age_bin(age)] if self._worth else 0.0
            if best < 0 or (worth, -age) < least:
                best, least = queue, (worth, -age)  # of equals the oldest
        return best

    def _reused(self, queue: int, age: int) -> None:
        self._reuses[queue][age_bin(age)] += 1
        self._sampled()

    def _sampled(self) -> None:
        self._samples += 1
        if self._samples % LEARN_EVERY == 0:
            self._learn()

    def _learn(self) -> None:
        pooled = [sum(column) for column in zip(*self._reuses, strict=True)]
        unused = sum(self._unused)
        scale = BORROWED / max(1.0, sum(pooled) + unused)
        self._worth = [
            worth_by_age([own + scale * shared for own, shared in zip(reuses, pooled, strict=True)],
                         self._unused[queue] + scale * unused)
            for queue, reuses in enumerate(self._reuses)
        ]  # fmt: skip
        self._reuses = [[FORGET * count for count in reuses] for reuses in self._reuses]
        self._unused = [FORGET * count for count in self._unused]


def age_bin(age: int) -> int:
    """Bins grow by a factor of the square root of 2."""
    if age < 2:
        return 0
    octave = age.bit_length() - 1
    half = age >= 1.5 * (1 << octave)
    return min(octave * BINS_PER_OCTAVE + half, NUM_BINS - 1)


def bin_width(index: int) -> float:
    """Ages that the bin holds."""
    return float(1 << index // BINS_PER_OCTAVE) / BINS_PER_OCTAVE if index > 1 else 1.0


def worth_by_age(reuses: Sequence[float], unused: float) -> list[float]:
    """Hits per block and unit of time that a block of each age gives, kept to the best age; `unused` never had one.

    The slopes of the concave hull of hits over room, from each age on: the hull is built from the highest age down.
    """
    left = unused + sum(reuses)
    points = [(0.0, 0.0)]  # room and hits up to the end of each bin
    for index, count in enumerate(reuses):
        room, hits = points[-1]
        points.append((room + bin_width(index) * (left - count / 2), hits + count))
        left -= count
    worth, hull = [0.0] * len(reuses), [points[-1]]
    for index in range(len(reuses) - 1, -1, -1):
        here = points[index]
        while len(hull) > 1 and _slope(here, hull[-2]) >= _slope(here, hull[-1]):
            hull.pop()
        worth[index] = _slope(here, hull[-1])
        hull.append(here)
    return worth


def _slope(begin: tuple[float, float], end: tuple[float, float]) -> float:
    room = end[0] - begin[0]
    return (end[1] - begin[1]) / room if room > 0 else 0.0
