"""What the front makes of the steps that messages tell: when each ended, and when somebody is shown it."""

import asyncio
import dataclasses

import pytest

from engine.config import EngineConfig
from engine.messages import Outputs, Submit
from engine.server.core.client import CoreClient
from engine.server.telemetry import full as telemetry
from engine.server.telemetry.full import Telemetry
from engine.telemetry import step_log
from engine.telemetry.step_rows import StepRows
from metrics.compute.step_costs import Appraiser
from metrics.records import StepRecord
from tests.engine.simulated import SHAPE, SimulatedRunner, Simulation
from tests.engine.telemetry.test_books import ask

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


def add(rows: StepRows, *messages: Outputs) -> None:
    for message in messages:
        if message.steps is not None:
            rows.add(message.steps)


@pytest.fixture
def one_by_one(monkeypatch):
    """Each step is told as soon as the next one is committed."""
    monkeypatch.setattr(step_log, "MOST_UNTOLD", 1)


def test_a_step_is_taken_once_it_is_over_and_due(one_by_one):
    messages, rows = told(), StepRows(hold_ns=3 * MS)
    add(rows, messages[0])
    first_ns = messages[0].committed_ns
    assert messages[0].untold_steps == 1 and not taken(rows), "nobody knows yet when it ended"
    add(rows, messages[1])
    assert not taken(rows, first_ns + 3 * MS - 1)
    [first] = taken(rows, first_ns + 3 * MS)
    assert first.step == 0 and messages[1].committed_ns > first.end_ns > first_ns
    add(rows, messages[2])
    second_ns = messages[1].committed_ns
    assert not taken(rows, second_ns + 3 * MS - 1), "the next ones are due a while after the first of them"
    [second] = taken(rows, second_ns + 3 * MS)
    assert second.step == 1 and second.past_tokens == [8] and not taken(rows)


@pytest.mark.parametrize("most", [1, 2, 3, 7])
@pytest.mark.parametrize("cut", [1, 2, 5])
def test_it_changes_nothing_when_steps_are_told_and_taken(monkeypatch, most, cut):
    """Of requests some of which evict what others left, and which come and go."""
    asked = [ask(f"r{index}", [index] * 16, 2 + 3 * index) for index in range(3)]
    whole, parts, found = StepRows(), StepRows(), []
    add(whole, *told(*asked, num_blocks=8))
    monkeypatch.setattr(step_log, "MOST_UNTOLD", most)
    for place, message in enumerate(told(*asked, num_blocks=8)):
        add(parts, message)
        if place % cut == 0:
            found += taken(parts)
    found += taken(parts)
    assert found == taken(whole) and [record.step for record in found] == list(range(len(found)))
    assert sum(record.evicted_blocks for record in found) and any(record.evicted_age_ns for record in found)


def test_what_a_steady_step_ran_as_stands_for_the_next_ones(monkeypatch):
    """The graph of a captured step and its padding are told when they change."""
    graphs, collect = (
        ["eager", "decode-4", "decode-4", "decode-4", "decode-8", "eager", "eager"],
        SimulatedRunner.collect,
    )

    def captured(runner, handle):
        outcome = collect(runner, handle)
        graph = graphs[min(len(graphs) - 1, runner.num_collected)]
        runner.num_collected += 1
        return dataclasses.replace(outcome, graph=graph, padding_tokens=0 if graph == "eager" else 3)

    monkeypatch.setattr(SimulatedRunner, "num_collected", 0, raising=False)
    monkeypatch.setattr(SimulatedRunner, "collect", captured)
    rows, messages = StepRows(), told(ask("a", [1] * 8, 9))
    add(rows, *messages)
    found = taken(rows)
    assert [record.graph for record in found] == graphs + ["eager"] * 2
    assert [record.padding_tokens for record in found] == [0, 3, 3, 3, 3, 0, 0, 0, 0]
    assert sum(len(message.steps.marks) for message in messages if message.steps) == 4


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


def test_who_looks_while_the_core_works_is_not_kept_waiting_for_the_step_under_way(monkeypatch, one_by_one):
    async def check() -> None:
        monkeypatch.setattr(telemetry, "SETTLE_SECONDS", 1e9)
        shown = front()
        for message in told()[:3]:
            shown.outputs(message)
        await asyncio.wait_for(shown.settle(), timeout=1)
        assert shown.recent.last_step == 1

    asyncio.run(check())


def test_who_looks_is_not_kept_waiting_by_a_core_that_is_dead(monkeypatch, one_by_one):
    async def check() -> None:
        monkeypatch.setattr(telemetry, "SETTLE_SECONDS", 0.01)
        shown = front()
        for message in told()[:-1]:
            shown.outputs(message)
        await asyncio.wait_for(shown.settle(), timeout=5)
        assert shown.recent.last_step == 3
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


def test_a_core_that_dies_at_work_loses_no_step_that_it_told_of(one_by_one):
    shown = front()
    for message in told()[:3]:
        shown.outputs(message)
    shown.core_died(restarts=False)
    assert shown.recent.last_step == 1


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
        add(shown._rows, *told())  # whose clock stood at nought: they are long due
        looking = asyncio.create_task(shown._observe_held_steps())
        while shown.recent.last_step < 4:
            await asyncio.sleep(0.01)
        looking.cancel()

    asyncio.run(asyncio.wait_for(check(), 20))
