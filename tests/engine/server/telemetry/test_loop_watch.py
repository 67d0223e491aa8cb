"""The turns of an event loop that kept everybody else waiting."""

import asyncio
import time

from sojourn.engine.server.telemetry.loop_watch import ROUNDED_NS, TURN_NS, LoopWatch

MS = 1_000_000


class Clock:
    def __init__(self):
        self.now = 1000 * MS

    def __call__(self) -> int:
        return self.now


def turn(watch: LoopWatch, clock: Clock, lasts_ns: int) -> None:
    watch.wait_begins()
    watch.wait_ends(None)
    clock.now += lasts_ns


def test_a_long_turn_has_its_begin_and_its_length_and_a_short_one_counts_only_in_the_sum():
    watch = LoopWatch(clock := Clock())
    turn(watch, clock, TURN_NS)
    turn(watch, clock, TURN_NS - 1)
    watch.wait_begins()
    assert watch.take() == {
        "loop_turn_begin_ns": [1000 * MS], "loop_turn_ns": [TURN_NS], "loop_busy_ns": 2 * TURN_NS - 1,
    }  # fmt: skip
    assert watch.take() == {"loop_turn_begin_ns": [], "loop_turn_ns": [], "loop_busy_ns": 2 * TURN_NS - 1}


def test_waiting_for_events_is_no_turn():
    watch = LoopWatch(clock := Clock())
    watch.wait_begins()
    clock.now += 500 * MS
    watch.wait_ends(None)
    watch.wait_begins()
    assert watch.busy_ns == 0 and watch.take()["loop_turn_ns"] == []


def test_a_wait_that_ends_long_after_its_time_begins_the_turn_at_that_time():
    """As where another thread holds the interpreter: the loop may not go on, though it has what it waited for."""
    watch = LoopWatch(clock := Clock())
    due_ns = watch.wait_begins() + 10 * MS
    clock.now = due_ns + 40 * MS
    watch.wait_ends(due_ns)
    clock.now += 2 * MS
    watch.wait_begins()
    assert watch.take()["loop_turn_ns"] == [42 * MS]


def test_a_wait_that_ends_in_time_for_its_resolution_is_not_late():
    watch = LoopWatch(clock := Clock())
    due_ns = watch.wait_begins() + 10 * MS + ROUNDED_NS
    clock.now = due_ns + TURN_NS - 1
    watch.wait_ends(due_ns)
    watch.wait_begins()
    assert watch.take()["loop_turn_ns"] == []


def test_a_block_of_the_real_loop_is_one_turn():
    watch = LoopWatch()

    async def block() -> tuple[int, int]:
        await asyncio.sleep(0.005)
        begin_ns = time.monotonic_ns()
        time.sleep(0.02)
        end_ns = time.monotonic_ns()
        await asyncio.sleep(0.002)
        return begin_ns, end_ns

    with asyncio.Runner(loop_factory=watch.new_event_loop) as runner:
        begin_ns, end_ns = runner.run(block())
    turns = watch.take()
    spans = zip(turns["loop_turn_begin_ns"], turns["loop_turn_ns"], strict=True)
    assert any(begin <= begin_ns and begin + lasted >= end_ns for begin, lasted in spans)
