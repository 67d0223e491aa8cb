"""What the front makes of the steps that messages tell: when each ended, and when somebody is shown it."""

import asyncio

import pytest

from engine.config import EngineConfig
from engine.messages import Outputs
from engine.server import telemetry
from engine.server.telemetry import Telemetry
from engine.step_rows import StepRows
from metrics.appraisal import Appraiser
from metrics.records import StepRecord
from tests.engine.simulated import SHAPE, Simulation
from tests.engine.test_books import ask

MS = 1_000_000


def told(max_tokens: int = 5) -> list[Outputs]:
    """The messages of a loop that served one request; the last one says that nothing is left."""
    simulation, messages = Simulation(), []
    simulation.engine.publish = lambda outputs: (messages.append(outputs), simulation.published.take(outputs))
    simulation.receive(ask("a", [1] * 8, max_tokens))
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
    shown = front()
    for message in told()[:3]:
        shown.outputs(message)
    shown.restarted()
    assert shown.recent.last_step == 2, "what it told is not lost, its last step neither"
    for message in told(7):
        shown.outputs(message)
    asyncio.run(shown.settle())
    assert shown.recent.last_step == 6 and len(shown.recent.steps()) == 3 + 7
