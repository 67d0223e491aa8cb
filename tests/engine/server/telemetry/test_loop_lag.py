"""A blocked event loop is seen."""

import asyncio
import time

import pytest

from sojourn.engine.server.telemetry.loop_lag import TICK_NS, LoopLag

MS = 1_000_000


@pytest.mark.parametrize("late_ns", [0, 1, 100_000, 100_001, 50_000 * MS, 63_000 * MS, 90_000 * MS])
def test_a_lateness_is_counted_once_at_its_bound(late_ns):
    lag = LoopLag()
    lag.observe(late_ns)
    place = lag.counts.index(1)
    assert sum(lag.counts) == 1 and lag.total_ns == late_ns
    assert place == len(lag.bounds_ns) or late_ns <= lag.bounds_ns[place]
    assert place == 0 or late_ns > lag.bounds_ns[place - 1]


def test_the_lateness_is_what_the_loop_slept_too_long():
    now = 0
    late = [0, 3 * MS, 250 * MS]

    async def sleep(seconds: float) -> None:
        nonlocal now
        if not late:
            raise asyncio.CancelledError
        now += round(seconds * 1e9) + late.pop(0)

    lag = LoopLag(lambda: now, sleep)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(lag.run())
    assert lag.total_ns == 253 * MS and sum(lag.counts) == 3


@pytest.mark.slow  # real time; the test above has a clock of its own
def test_a_block_of_the_real_loop_shows():
    async def block() -> LoopLag:
        lag = LoopLag()
        ticking = asyncio.create_task(lag.run())
        await asyncio.sleep(0.01)
        time.sleep(0.4)  # until long after the tick was due
        await asyncio.sleep(0.01)
        ticking.cancel()
        return lag

    lag = asyncio.run(block())
    assert lag.total_ns >= 0.4 * 1e9 - TICK_NS - 50 * MS
