"""Two messages a step: tokens, which users wait for, and behind them what the loop observed."""

import asyncio
import dataclasses

import pytest

from sojourn.engine.config import EngineConfig
from sojourn.engine.messages import Abort, Observed, Submit, Tokens
from sojourn.engine.server.core.client import CoreClient
from sojourn.engine.server.core.sequence import CoreLost
from sojourn.engine.server.core.spare import Spare
from sojourn.engine.server.telemetry import full
from sojourn.engine.server.telemetry.full import Telemetry
from sojourn.engine.server.telemetry.off import NoTelemetry
from sojourn.metrics.compute.step_costs import StepCosts
from sojourn.metrics.ledger import Account, ledger_at
from sojourn.metrics.run.recorder import FLUSH_SECONDS, ON_DISK_SECONDS
from tests.engine.harness import stream_of
from tests.engine.simulated import SHAPE, Simulation
from tests.engine.telemetry.test_observer import ask


def watched(simulation: Simulation) -> list[Tokens | Observed]:
    """The messages of its loop, as they come."""
    messages: list[Tokens | Observed] = []
    simulation.engine.publish = lambda message: (messages.append(message), simulation.published.take(message))
    return messages


def sent(*requests: Submit, num_blocks: int = 64) -> list[Tokens | Observed]:
    """The messages of a loop that served one request after the other."""
    simulation = Simulation(num_blocks)
    messages = watched(simulation)
    for request in requests or [ask("a", [1] * 8, 5)]:
        simulation.receive(request)
        simulation.drain()
    return messages


def last_tokens(message: Tokens | Observed) -> list[tuple[str, str]]:
    """The requests that had their last token, with the finish reason."""
    outputs = message.outputs if isinstance(message, Tokens) else []
    return [(output.request_id, output.finish_reason) for output in outputs if output.finish_reason]


@pytest.mark.parametrize("overlap", [False, True])
def test_each_step_sends_its_tokens_and_then_its_one_record_with_the_requests_that_it_ended(overlap):
    simulation = Simulation(overlap=overlap)
    messages = watched(simulation)
    simulation.receive(ask("short", [1] * 8, 3), ask("long", [2] * 8, 5))
    simulation.drain()
    tokens, observed = messages[::2], messages[1::2]
    assert {type(message) for message in tokens} == {Tokens} and {type(message) for message in observed} == {Observed}
    assert [message.step.step for message in observed] == list(range(len(observed)))
    for first, second in zip(tokens, observed, strict=True):
        assert first.next_step == second.step.step + 1
        assert {name for name, _ in last_tokens(first)} == {ended.request_id for ended in second.ended}
        assert len(first.outputs) == second.step.emitted_tokens
        assert second.step.end_ns > first.committed_ns
    assert [last_tokens(message) for message in tokens if last_tokens(message)] == [
        [("short", "length")], [("long", "length")]
    ]  # fmt: skip


def test_the_ledger_of_an_end_holds_what_its_last_token_held():
    simulation = Simulation()
    simulation.receive(ask("a", [1] * 8, 3), ask("b", [2] * 9, 6))
    simulation.drain()
    for name, ended in simulation.published.ended.items():
        assert simulation.published.ledgers[name][-1] == (ended.booked_ns, ended.ledger)


def test_the_index_learns_of_a_step_only_when_its_tokens_are_out():
    simulation = Simulation()
    simulation.check = lambda: None  # which would flush
    seen = []
    simulation.engine.publish = lambda message: seen.append((type(message), len(simulation.block_observer.shadow)))
    simulation.receive(ask("a", [1] * 8, 2))
    simulation.drain()
    assert seen == [(Tokens, 0), (Observed, 2), (Tokens, 2), (Observed, 2)]


@pytest.mark.parametrize("token", [None, 7])
def test_an_error_comes_whole_behind_the_tokens_of_its_step(token):
    """Of an error the front needs its sentence, with a token or without."""
    simulation = Simulation()
    messages = watched(simulation)
    collect = simulation.runner.collect

    def fails(handle):
        outcome = collect(handle)
        sampled = {} if token is None else {"a": [token]}
        return dataclasses.replace(outcome, sampled=sampled, finishes={"a": ("error", "it is broken")})

    simulation.receive(ask("a", [1] * 8, 5))
    simulation.runner.collect = fails
    simulation.step()
    tokens, observed = messages
    assert not last_tokens(tokens) and [output.token_id for output in tokens.outputs] == ([token] if token else [])
    assert [(ended.reason, ended.error) for ended in observed.ended] == [("error", "it is broken")]
    assert observed.ended[0].prefix is not None


def test_a_request_that_ends_between_two_steps_is_reported_when_the_loop_falls_idle():
    simulation = Simulation()
    messages = watched(simulation)
    simulation.receive(ask("a", [1] * 8, 5))
    simulation.step()
    messages.clear()
    simulation.receive(Abort("a"))
    simulation.drain()
    tokens, observed = messages
    assert (tokens.outputs, tokens.running, observed.step) == ([], 0, None)
    assert [ended.request_id for ended in observed.ended] == ["a"]
    simulation.engine.flush()
    assert len(messages) == 2, "nothing is left to report"


def test_times_of_blocks_that_a_step_evicted_are_in_its_record():
    """Each prompt evicts the one before, in a pool whose every block is sampled."""
    simulation = Simulation(6)
    for name in "abc":
        simulation.receive(ask(name, [ord(name)] * 16, 2))
        simulation.drain()
    records = simulation.published.records
    assert sum(record.evicted_blocks for record in records) > 0
    assert all(len(record.evicted_age_ns) == record.evicted_blocks for record in records)


def test_a_core_that_dies_between_a_last_token_and_its_end_costs_no_answer():
    async def check() -> None:
        core = CoreClient(EngineConfig(model="tiny-model"), NoTelemetry(EngineConfig(model="tiny-model")), Spare())
        try:
            simulation = Simulation()
            messages = watched(simulation)
            simulation.receive(ask("a", [1] * 8, 3), ask("b", [2] * 8, 5))
            simulation.drain()
            streams = {name: stream_of(ask(name, [1] * 8, 3)) for name in "ab"}
            core.streams = dict(streams)
            last = next(place for place, message in enumerate(messages) if last_tokens(message))
            for message in messages[: last + 1]:
                core._take(message)
            assert core.free_places == core.config.max_num_seqs - 1, "its place is free"
            core.fail_open_streams()
            assert not core.streams
            finished, lost = streams["a"], streams["b"]
            assert finished.done.is_set() and finished.ended.reason == lost.ended.reason == "lost"
            assert finished.take().finish_reason == "length"
            with pytest.raises(CoreLost):
                lost.take()
            ledger = finished.write(0).source.ledger_now()
            assert ledger[Account.REQUEST_LOST] == 0 < finished.ended.ledger[Account.REQUEST_LOST]
            assert ledger == ledger_at(simulation.published.bases["a"].base, messages[last].clock_ns)
        finally:
            await core.stop()

    asyncio.run(check())


@pytest.mark.parametrize("at_once", [1, 2, 50])
def test_a_stream_writes_each_step_or_once_for_all_that_wait_in_the_front(at_once):
    """What a client gets is the same; a front that is behind catches up, and one that is not delays no token."""

    async def check() -> None:
        config = EngineConfig(model="tiny-model")
        core, simulation, writes = CoreClient(config, NoTelemetry(config), Spare()), Simulation(), 0
        sent = watched(simulation)
        simulation.receive(ask("a", [1] * 8, 20))
        simulation.drain()
        stream = core.streams["a"] = stream_of(ask("a", [1] * 8, 20))
        said = list(sent)

        class Process:
            async def receive(self) -> tuple[list, int]:
                if not said:
                    await asyncio.Event().wait()
                batch, said[: 2 * at_once] = said[: 2 * at_once], []  # of each step its tokens and its record
                return batch, 0

        async def read() -> None:
            nonlocal writes
            while stream.finish_reason is None:
                await stream.updated.wait()
                stream.updated.clear()
                stream.take()
                writes += 1

        listening = asyncio.create_task(core._listen(Process()))
        try:
            await asyncio.wait_for(read(), timeout=10)
        finally:
            listening.cancel()
            await core.stop()
        assert writes == -(-20 // at_once) and stream.output_tokens == 20

    asyncio.run(check())


def front() -> Telemetry:
    telemetry = Telemetry(EngineConfig(model="tiny-model"))
    telemetry.costs = StepCosts(SHAPE)
    return telemetry


def deliver(telemetry: Telemetry, messages: list[Tokens | Observed]) -> None:
    for message in messages:
        (telemetry.tokens if isinstance(message, Tokens) else telemetry.observed)(message)


def test_a_scrape_waits_for_the_record_of_a_step_whose_tokens_are_out():
    async def check() -> None:
        messages, telemetry = sent(), front()
        deliver(telemetry, messages[:-1])
        refresh = asyncio.create_task(telemetry.refresh())
        await asyncio.sleep(0.005)
        assert not refresh.done() and telemetry.recent.last_step == -1
        deliver(telemetry, messages[-1:])
        await refresh
        assert telemetry.recent.last_step == 4

    asyncio.run(check())


def test_a_scrape_does_not_wait_for_a_core_that_is_dead(monkeypatch):
    monkeypatch.setattr(full, "OBSERVED_SECONDS", 0.01)
    telemetry = front()
    deliver(telemetry, sent()[:-1])
    asyncio.run(asyncio.wait_for(telemetry.refresh(), timeout=5))
    assert telemetry.recent.last_step == 3
    monkeypatch.setattr(full, "OBSERVED_SECONDS", 1e9)
    telemetry.core_died(restarts=False)
    asyncio.run(asyncio.wait_for(telemetry.refresh(), timeout=1))


def test_a_core_that_dies_loses_no_step_that_it_reported():
    telemetry = front()
    deliver(telemetry, sent()[:4])
    telemetry.core_died(restarts=False)
    assert telemetry.recent.last_step == 1


def test_another_core_begins_another_count():
    """In a pool of six blocks, each request but the first evicts what the one before left."""
    messages = sent(*(ask(f"r{index}", [index] * 16, 2) for index in range(3)), num_blocks=6)
    telemetry = front()
    deliver(telemetry, messages)
    telemetry.core_died(restarts=True)
    deliver(telemetry, messages)
    asyncio.run(telemetry.refresh())
    evicted = [record.evicted_blocks for record in telemetry.recent.steps()]
    assert evicted == evicted[: len(evicted) // 2] * 2 and sum(evicted) > 0 <= min(evicted)


def test_steps_are_folded_and_written_within_a_second(monkeypatch):
    """A front that is killed loses no older one: the recorder writes what was folded."""

    async def check() -> None:
        monkeypatch.setattr(full, "FOLD_SECONDS", 0.01)
        telemetry = front()
        deliver(telemetry, sent())
        folding = asyncio.create_task(telemetry._fold_regularly())
        while telemetry.recent.last_step < 4:
            await asyncio.sleep(0.01)
        folding.cancel()

    assert full.FOLD_SECONDS + FLUSH_SECONDS < ON_DISK_SECONDS
    asyncio.run(asyncio.wait_for(check(), 20))
