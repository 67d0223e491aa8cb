"""When the loop tells that a request is over, and what it makes wait for that: no token for anybody's books."""

import asyncio
import dataclasses

import pytest

from engine.config import EngineConfig
from engine.messages import Outputs
from engine.server.core.client import CoreClient, Work
from metrics.ledger import Account, ledger_at
from tests.engine.published import records_of
from tests.engine.simulated import Simulation
from tests.engine.telemetry.test_books import ask


def watched(simulation: Simulation) -> list[Outputs]:
    """The messages of its loop, as they come."""
    messages: list[Outputs] = []
    simulation.engine.publish = lambda outputs: (messages.append(outputs), simulation.published.take(outputs))
    return messages


def ends(message: Outputs) -> list[tuple[str, str]]:
    """Who had a last token, and how it ended."""
    return [(output.request_id, output.finish_reason) for output in message.outputs if output.finish_reason]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_last_token_says_so_and_the_books_come_with_the_next_step(overlap):
    simulation = Simulation(overlap=overlap)
    messages = watched(simulation)
    simulation.receive(ask("short", [1] * 8, 3), ask("long", [2] * 8, 5))
    simulation.drain()
    assert [ends(message) for message in messages if ends(message)] == [[("short", "length")], [("long", "length")]]
    told = {ended.request_id: place for place, message in enumerate(messages) for ended in message.ended}
    [last] = [place for place, message in enumerate(messages) if ends(message) == [("short", "length")]]
    assert told == {"short": last + 1, "long": len(messages) - 1}
    assert [output.request_id for output in messages[last + 1].outputs] == ["long"], "a message of its own would cost"
    assert not messages[-1].outputs, "the loop was idle: it has told at once"


def test_the_books_of_an_end_hold_what_its_last_token_held():
    simulation = Simulation()
    simulation.receive(ask("a", [1] * 8, 3), ask("b", [2] * 9, 6))
    simulation.drain()
    for name, ended in simulation.published.ended.items():
        assert simulation.published.ledgers[name][-1] == (ended.booked_ns, ended.ledger)


def test_the_index_books_an_end_only_when_the_last_token_is_out():
    simulation = Simulation()
    simulation.check = lambda: None  # which would book
    at_publish = []
    simulation.engine.publish = lambda outputs: at_publish.append(
        (bool(outputs.outputs), len(simulation.journal.shadow))
    )
    simulation.receive(ask("a", [1] * 8, 5))
    simulation.drain()
    *steps, last, idle = at_publish
    assert steps == [(True, 0)] * 4 and last == (True, 0) and idle == (False, 3)


@pytest.mark.parametrize("token", [None, 7])
def test_an_error_is_told_whole_and_at_once(token):
    """Of an error the front needs its sentence, with a token or without."""
    simulation = Simulation()
    messages = watched(simulation)
    collect = simulation.runner.collect

    def fails(handle):
        outcome = collect(handle)
        sampled = {} if token is None else {"a": token}
        return dataclasses.replace(outcome, sampled=sampled, ended={"a": ("error", "it is broken")})

    simulation.receive(ask("a", [1] * 8, 5))
    simulation.runner.collect = fails
    simulation.step()
    [message] = messages
    assert not ends(message) and [output.token_id for output in message.outputs] == ([token] if token else [])
    assert [(ended.reason, ended.error) for ended in message.ended] == [("error", "it is broken")]
    assert message.ended[0].prefix is not None


def test_times_of_blocks_that_are_found_after_the_last_step_belong_to_it():
    """Each prompt evicts the one before, in a pool whose every block is sampled: the last eviction is booked at the
    end, when the last step was put down."""
    simulation = Simulation(6)
    messages = watched(simulation)
    for name in "abc":
        simulation.receive(ask(name, [ord(name)] * 16, 2))
        simulation.drain()
    records = records_of(messages)
    found = [ns for record in records for ns in record.evicted_age_ns]
    assert found and sum(record.evicted_blocks for record in records) == len(found)
    assert any(records[place].evicted_age_ns for place in (3, 5)), "the last step of a request has them"


def test_what_comes_late_is_added_to_what_a_step_had():
    """The journal finds some with each of two steps, and some more when both are over."""
    simulation = Simulation()
    messages, journal = watched(simulation), simulation.scheduler.journal
    simulation.receive(ask("a", [1] * 8, 2))
    for age_ns in (4, 5):
        journal._times.evicted_age_ns, journal.has_times = [age_ns], True
        journal.shadow.forgotten += 1
        simulation.step()
    journal.shadow.forgotten += 3
    journal._times.evicted_age_ns, journal._times.reuse_gap_ns, journal.has_times = [6, 7], [8], True
    simulation.drain()
    first, second = records_of(messages)
    assert (first.evicted_age_ns, first.reuse_gap_ns) == ([4], [])
    assert (second.evicted_age_ns, second.reuse_gap_ns) == ([5, 6, 7], [8])
    assert (first.forgotten_blocks, second.forgotten_blocks) == (1, 4)


def test_a_core_that_dies_between_a_last_token_and_its_books_costs_no_answer():
    async def check() -> None:
        core = CoreClient(EngineConfig(model="tiny-model"), *[lambda *_: None] * 3)
        try:
            simulation = Simulation()
            messages = watched(simulation)
            simulation.receive(ask("a", [1] * 8, 3), ask("b", [2] * 8, 5))
            simulation.drain()
            works = {name: Work(name, asyncio.Event(), 8, 0) for name in "ab"}
            core.works = dict(works)
            last = next(place for place, message in enumerate(messages) if ends(message))
            for message in messages[: last + 1]:
                core._take(message)
            assert set(core.works) == {"b"} and set(core.finished) == {"a"}
            assert core.free_places == core.config.max_num_seqs - 1, "its place is free"
            core.fail_open_works()
            assert not core.works and not core.finished
            done, lost = works["a"], works["b"]
            assert done.finish_reason == "length" and lost.finish_reason is None
            assert done.over.is_set() and done.ended.reason == lost.ended.reason == "lost"
            assert done.told.ledger_now()[Account.REQUEST_LOST] == 0 < done.ended.ledger[Account.REQUEST_LOST]
            standing = simulation.published.standings["a"]
            assert done.told.ledger_now() == ledger_at(standing.base, messages[last].reading)
        finally:
            await core.stop()

    asyncio.run(check())
