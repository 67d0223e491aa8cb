"""How late the front's event loop is: what blocks it stalls every stream at once."""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable

from sojourn.metrics.catalog.metric import LAG_BOUNDS, NS_PER_SECOND

TICK_NS = 100_000_000


class LoopLag:
    """The lateness of a timer that rings every 100 ms, as a histogram.

    A block is seen from the moment when the timer was due: nothing of one that ends before, and of a long one all but
    100 ms at most. Who blocked is not told.
    """

    bounds_ns = tuple(round(bound * NS_PER_SECOND) for bound in LAG_BOUNDS)  # a quiet loop is late by some 100 µs

    def __init__(
        self,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ):
        self.counts = [0] * (len(self.bounds_ns) + 1)  # the last: above all bounds
        self.total_ns = 0
        self._clock_ns, self._sleep = clock_ns, sleep

    async def run(self) -> None:
        """Ticks until it is cancelled. Each tick is due 100 ms after the one before was heard."""
        while True:
            due_ns = self._clock_ns() + TICK_NS
            await self._sleep(TICK_NS / 1e9)
            self.observe(max(0, self._clock_ns() - due_ns))

    def observe(self, late_ns: int) -> None:
        self.counts[bisect_left(self.bounds_ns, late_ns)] += 1
        self.total_ns += late_ns
