"""Time to live: idle blocks expire, and make room before that in the order of time.

Expired blocks are freed even where memory is plentiful: a bound on how long anybody's keys and values stay.
"""

import time
from collections.abc import Callable, Sequence
from typing import ClassVar

from sojourn.engine.memory.cached_block import CachedBlock
from sojourn.engine.memory.eviction.policy import EvictionPolicy


class Ttl(EvictionPolicy):
    """One queue in the order of time. The clock is given, in nanoseconds."""

    name: ClassVar[str] = "ttl"
    has_clock: ClassVar[bool] = True

    def __init__(self, seconds: float, clock: Callable[[], int] = time.monotonic_ns):
        self.num_queues = 1
        self._ttl_ns = int(seconds * 1e9)
        self._clock = clock

    def became_idle(self, block: CachedBlock, now: int) -> Sequence[CachedBlock]:
        block.idle_ns = self._clock()
        return ()

    def is_expired(self, block: CachedBlock) -> bool:
        return self._clock() - block.idle_ns > self._ttl_ns
