"""What the front makes of the steps that messages tell: when each ended, and when somebody is shown it."""

import asyncio

import pytest

from engine.config import EngineConfig
from engine.messages import Outputs, Submit
from engine.server import telemetry
from engine.server.core_client import CoreClient
from engine.server.telemetry import Telemetry
from engine.step_rows import StepRows
from metrics.appraisal import Appraiser
from metrics.records import StepRecord
from tests.engine.simulated import SHAPE, Simulation
from tests.engine.test_books import ask

MS = 1_000_000


def told(*requests: Submit, num_blocks: int = 64) -> list[Outputs]:
    """The messages of a loop that served a request, or some one after the other; the last one says that nothing is
    left."""
    simulation, messages = Simulation(num_blocks), []
    simulation.engine.publish = lambda outputs: (messages.append(outputs), simulation.published.take(outputs))
    for request in requests or [ask("a", [1] * 8, 5)]:
        simulation.receive(request)
        simulation.drain()
    return messages


def taken(rows: StepRows, now_ns: int | None = None) -> list[StepRecord]:
    steps = rows.take(now_ns)
    return [] if steps is None else steps.records()


def front() -> Telemetry:
    front = Telemetry(EngineConfig(model="tiny-model"))
    front.appraiser = Appraiser(SHAPE)
    return front


def test_a_step_is_taken_once_it_is_over_and_due():
    messages, rows = told(), StepRows(hold_ns=3 * MS)
    rows.take_in(messages[0])
    first_ns = messages[0].committed_ns
    assert rows.is_open and not taken(rows), "nobody knows yet when it ended"
    rows.take_in(messages[1])
    assert not taken(rows, first_ns + 3 * MS - 1)
    [first] = taken(rows, first_ns + 3 * MS)
    assert first.step == 0 and first.end_ns == messages[1].step_ended_ns > first_ns
    rows.take_in(messages[2])
    second_ns = messages[1].committed_ns
    assert not taken(rows, second_ns + 3 * MS - 1), "the next ones are due a while after the first of them"
    [second] = taken(rows, second_ns + 3 * MS)
    assert second.step == 1 and second.past_tokens == [8] and rows.is_open and not taken(rows)


@pytest.mark.parametrize("cut", range(1, 6))
def test_it_changes_nothing_when_steps_are_taken(cut):
    messages, whole, parts = told(), StepRows(), StepRows()
    found = []
    for place, message in enumerate(messages):
        whole.take_in(message)
        parts.take_in(message)
        if place % cut == 0:
            found += taken(parts)
    found += taken(parts)
    assert found == taken(whole) and [record.step for record in found] == [0, 1, 2, 3, 4]


def test_the_last_step_of_a_core_that_died_ended_with_its_commit():
    messages, rows = told(), StepRows()
    for message in messages[:3]:
        rows.take_in(message)
    rows.close()
    last = taken(rows)[-1]
    assert (last.step, last.end_ns, last.stages[-1]) == (2, messages[2].committed_ns, 0)
    assert sum(last.stages) == last.end_ns - last.begin_ns


def test_who_looks_sees_the_last_step_as_soon_as_the_core_has_said_when_it_ended():
    async def check() -> None:
        messages, shown = told(), front()
        for message in messages[:-1]:
            shown.outputs(message)
        looks = asyncio.create_task(shown.settle())
        await asyncio.sleep(0.005)
        assert not looks.done() and shown.recent.last_step == -1
        shown.outputs(messages[-1])
        await looks
        assert shown.recent.last_step == 4

    asyncio.run(check())


def test_who_looks_while_the_core_works_is_not_kept_waiting_for_the_step_under_way(monkeypatch):
    async def check() -> None:
        monkeypatch.setattr(telemetry, "SETTLE_SECONDS", 1e9)
        shown = front()
        for message in told()[:3]:
            shown.outputs(message)
        await asyncio.wait_for(shown.settle(), timeout=1)
        assert shown.recent.last_step == 1

    asyncio.run(check())


def test_who_looks_is_not_kept_waiting_by_a_core_that_is_dead(monkeypatch):
    async def check() -> None:
        monkeypatch.setattr(telemetry, "SETTLE_SECONDS", 0.01)
        shown = front()
        for message in told()[:-1]:
            shown.outputs(message)
        await asyncio.wait_for(shown.settle(), timeout=5)
        assert shown.recent.last_step == 4
        monkeypatch.setattr(telemetry, "SETTLE_SECONDS", 1e9)
        await asyncio.wait_for(shown.settle(), timeout=1)  # it has been given up

    asyncio.run(check())


def test_another_core_begins_another_count():
    """In a pool of six blocks, each request but the first evicts what the one before left."""
    messages = told(*(ask(f"r{index}", [index] * 16, 2) for index in range(3)), num_blocks=6)
    shown = front()
    for message in messages:
        shown.outputs(message)
    shown.core_died(restarts=True)
    for message in messages:
        shown.outputs(message)
    asyncio.run(shown.settle())
    evicted = [record.evicted_blocks for record in shown.recent.steps()]
    assert evicted == evicted[: len(evicted) // 2] * 2 and sum(evicted) > 0 <= min(evicted)


def test_a_core_that_dies_at_work_loses_no_step_that_it_told_of():
    shown = front()
    for message in told()[:3]:
        shown.outputs(message)
    shown.core_died(restarts=False)
    assert shown.recent.last_step == 2


def test_the_last_messages_of_a_core_are_handed_over_before_its_death():
    async def check() -> None:
        seen: list[object] = []
        core = CoreClient(EngineConfig(model="tiny-model"), lambda _: None, seen.append, seen.append)
        last = told()[-1]
        core._take(last)
        core._tell_of_death(restarts=True)
        await asyncio.sleep(0)
        assert seen == [last, True]
        await core.stop()

    asyncio.run(check())


def test_steps_of_a_core_that_has_fallen_silent_are_shown_once_they_are_due(monkeypatch):
    async def check() -> None:
        monkeypatch.setattr(telemetry, "LOOK_SECONDS", 0.01)
        shown = front()
        for message in told():  # whose clock stood at nought: they are long due
            shown._rows.take_in(message)
        looking = asyncio.create_task(shown._observe_held_steps())
        while shown.recent.last_step < 4:
            await asyncio.sleep(0.01)
        looking.cancel()

    asyncio.run(asyncio.wait_for(check(), 20))
