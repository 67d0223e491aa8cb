"""Segmented LRU: blocks that were read again are protected from the stream of blocks that are read once.

Karedla, Love, Wherry, *Caching strategies to improve disk system performance*, IEEE Computer 27(3), 1994.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from sojourn.engine.memory.cached_block import CachedBlock
from sojourn.engine.memory.eviction.policy import EvictionPolicy

PROTECTED_SHARE = 0.8  # of the pool
PROBATION, PROTECTED = 0, 1


class SegmentedLru(EvictionPolicy):
    """Blocks on probation go first. Where the protected ones exceed their share, the oldest returns to probation."""

    name: ClassVar[str] = "segmented-lru"
    counts_uses: ClassVar[bool] = True

    def __init__(self, num_blocks: int):
        self.num_queues = 2
        self._capacity = max(1, int(PROTECTED_SHARE * num_blocks))
        self._protected: OrderedDict[int, CachedBlock] = OrderedDict()  # idle, oldest first

    def became_idle(self, block: CachedBlock, now: int) -> Sequence[CachedBlock]:
        block.queue = PROTECTED if block.uses else PROBATION
        if block.queue == PROBATION:
            return ()
        self._protected[block.block] = block
        if len(self._protected) <= self._capacity:
            return ()
        _, oldest = self._protected.popitem(last=False)
        oldest.queue, oldest.uses = PROBATION, 0
        return (oldest,)

    def became_busy(self, block: CachedBlock) -> None:
        self._protected.pop(block.block, None)

    def used(self, block: CachedBlock, age: int) -> None:
        block.uses += 1

    def evicted(self, block: CachedBlock, now: int) -> None:
        self._protected.pop(block.block, None)
