"""Least frequently used: of the blocks that the fewest requests found in the cache, the oldest goes first.

A count is halved each time the pool's worth of blocks became idle HALF_LIFE times, so that a prompt that was popular
yesterday does not stay for ever (ageing as in Arlitt et al., *Performance Evaluation Review* 27(4), 2000).
"""

from collections.abc import Sequence
from typing import ClassVar

from sojourn.engine.memory.cached_block import CachedBlock
from sojourn.engine.memory.eviction.policy import EvictionPolicy

HALF_LIFE = 8  # pools


class Lfu(EvictionPolicy):
    """A queue for each count of uses; the last one holds all higher counts."""

    name: ClassVar[str] = "lfu"
    counts_uses: ClassVar[bool] = True

    def __init__(self, num_blocks: int):
        self.num_queues = 16
        self._half_life = HALF_LIFE * num_blocks

    def became_idle(self, block: CachedBlock, now: int) -> Sequence[CachedBlock]:
        block.queue = min(block.uses, self.num_queues - 1)
        return ()

    def used(self, block: CachedBlock, age: int) -> None:
        block.uses = (block.uses >> min(age // self._half_life, 32)) + 1
