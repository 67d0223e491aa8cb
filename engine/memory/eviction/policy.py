"""What an eviction policy decides, with the defaults that most policies share."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

from sojourn.engine.memory.cached_block import CachedBlock


class EvictionPolicy(Protocol):
    """Puts idle blocks into queues, and chooses the queue that loses its head.

    The index keeps each queue in the order in which its blocks became idle, and offers only leaves. A policy never sees
    tokens, and time is the number of blocks that became idle: the same calls always evict the same blocks.
    """

    name: ClassVar[str]
    num_queues: int
    counts_uses: ClassVar[bool] = False  # whether it needs `used`
    has_clock: ClassVar[bool] = False  # whether blocks expire

    def __init__(self, num_blocks: int):
        self.num_queues = 1

    def became_idle(self, block: CachedBlock, now: int) -> Sequence[CachedBlock]:
        """The block's last reader left: sets its queue. Returns idle blocks that this moves to another queue."""
        return ()

    def became_busy(self, block: CachedBlock) -> None:
        """A request reads the idle block."""
        return None

    def used(self, block: CachedBlock, age: int) -> None:
        """A request that was admitted reads the block, which had been idle for `age`."""
        return None

    def inserted(self, block: CachedBlock, now: int) -> None:
        """The block was computed."""
        return None

    def evicted(self, block: CachedBlock, now: int) -> None:
        """The block is gone; `idle_since` says since when it was idle."""
        return None

    def victim_queue(self, heads: Sequence[CachedBlock | None], now: int) -> int:
        """Which queue loses its head. At least one queue has one."""
        return next(queue for queue, head in enumerate(heads) if head is not None)

    def is_expired(self, block: CachedBlock) -> bool:
        """The head of a queue is too old to be read again."""
        return False
