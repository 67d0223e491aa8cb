"""The loop's observer: requests that decode share a clock, and yet each has its own nanoseconds, tokens and causes."""

from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.engine.adapter import AdapterReference
from sojourn.engine.messages import Abort, Submit
from sojourn.engine.request.policies import POLICIES
from sojourn.engine.sampling import SamplingParams
from sojourn.engine.telemetry.accounting import Accountant
from sojourn.engine.telemetry.observer import FullObserver
from sojourn.engine.telemetry.step_records import StepRecords
from sojourn.metrics.ledger import Account
from sojourn.metrics.records import WAITS
from tests.engine.simulated import SHAPE, SimulatedPreparation, Simulation, sequential
from tests.engine.telemetry.one_by_one import BothAccountants, OneByOne
from tests.engine.test_overlap import assert_closed, traffic

ADAPTERS = (None, *(AdapterReference(name, "", "0", 1, 1, 1) for name in ("a", "b", "c")))
BOUNDS = {
    "max_loras": st.sampled_from([1, 2]),
    "num_blocks": st.sampled_from([12, 16, 64]),
    "policy": st.sampled_from(sorted(POLICIES)),
    "max_num_batched_tokens": st.sampled_from([5, 32]),
    "max_num_seqs": st.sampled_from([3, 8]),
    "prefix_caching": st.booleans(),
    "overlap": st.booleans(),
}


SPECULATION = (
    {"speculation": "ngram", "speculation_adaptive": "off", "speculation_tokens": 3},
    {"speculation": "early-exit", "speculation_adaptive": "off"},
    {"speculation": "ngram"},
)


def ask(name: str, prompt: list[int], max_tokens: int, encoded_ns: int = 0, **more) -> Submit:
    return Submit(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), encoded_ns, **more)


def play(events: list[tuple[str, object]], held: int, limits: dict, **bounds) -> tuple[Simulation, BothAccountants]:
    """Every `held`-th request is held for a while before it may be scheduled, and the third of those is refused."""
    simulation = Simulation(**(bounds | limits))
    both = BothAccountants(Accountant(SHAPE), OneByOne(SHAPE))
    scheduler = simulation.scheduler
    records = StepRecords(scheduler.pool, simulation.block_observer, scheduler.techniques)
    simulation.engine.observer = FullObserver(both, records, scheduler.techniques)
    for index, (kind, what) in enumerate(events):
        simulation.clock.tick_ns = 300 + 701 * index % 3000  # no two steps take the host alike
        if kind == "submit":
            if held and index % held == 0:
                error = "no token fits" if index % 3 == 2 else None
                reason = "adapter" if index % 2 else "grammar"
                ready_ns = simulation.clock.now_ns + 2_500_000
                preparation = SimulatedPreparation(simulation.clock, ready_ns, error, reason)
                simulation.model.preparations[what.request_id] = preparation
            again = msgspec.structs.replace(what, encoded_ns=simulation.clock(), adapter=ADAPTERS[index % 4])
            simulation.receive(again)
        elif kind == "abort":
            simulation.receive(Abort(what))
        elif simulation.engine.has_work:
            simulation.step()
    simulation.drain()
    simulation.check_idle()
    return simulation, both


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=traffic(),
    held=st.sampled_from([0, 2, 5]),
    limits=st.sampled_from([{}, {"max_long_prefills": 1, "long_prefill_tokens": 12}]),
    bounds=st.fixed_dictionaries(BOUNDS | {"knobs": st.sampled_from([None, *SPECULATION])}),
)
def test_the_shared_clock_books_to_each_request_what_booking_one_by_one_does(events, held, limits, bounds):
    """Arrivals, aborts, forks, preemptions, chunks, held requests, every policy, with and without overlap: compared to
    the nanosecond after every step, at every end, and as the front puts it together."""
    simulation, both = play(events, held, limits, **bounds)
    published, submitted_ns = simulation.published, simulation.submitted_ns
    assert_closed(simulation)
    for name, ended in published.ended.items():
        assert sum(ended.ledger) == ended.booked_ns - submitted_ns[name] and min(ended.ledger) >= 0, name
        assert set(ended.waits) <= set(WAITS) and all(ns > 0 for ns in ended.waits.values())
        for committed_ns, ledger in published.ledgers.get(name, []):
            assert ledger == both.ledgers[name, committed_ns], "the front knows what the core does"
    assert set(published.ended) == set(submitted_ns)
    assert both.steps == len(published.records)
    assert not both.clock.members


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=traffic(),
    limits=st.sampled_from([{}, {"max_long_prefills": 1, "long_prefill_tokens": 12}]),
    bounds=st.fixed_dictionaries(BOUNDS),
)
def test_tokens_preemptions_and_recomputed_positions_agree_by_request_and_by_step(events, limits, bounds):
    simulation, _ = play(events, 0, limits, **bounds)
    published = simulation.published
    lengths = {what.request_id: len(what.prompt_token_ids) for kind, what in events if kind == "submit"}
    shares = [share for record in published.records for share in _shares(record)]
    preempted = Counter(name for record in published.records for name in record.preempted_ids)
    for name, ended in published.ended.items():
        mine = [share for share in shares if share[0] == name]
        overrun = sum(new for _, kind, new, _, step in mine if ended.last_step is not None and step > ended.last_step)
        again = sum(new for _, kind, new, _, _ in mine if kind == "recompute")
        first = sum(new for _, kind, new, _, _ in mine if kind != "recompute")
        assert preempted[name] == ended.preemptions
        if ended.reason != "abort":
            output = len(published.tokens.get(name, []))
            assert ended.cached_tokens + ended.computed_tokens == lengths[name] + output - 1
            assert (first - overrun, again) == (ended.computed_tokens, ended.recomputed_tokens)
            assert ended.preemptions or not ended.recomputed_tokens
        assert bool(ended.ledger[Account.MEMORY_RECOMPUTE]) == bool(ended.recomputed_tokens)
    for record in published.records:
        assert len(record.preempted_ids) == len(record.preempted_for) == len(record.preempted_tokens)
        for name, wanted_by, tokens in zip(
            record.preempted_ids, record.preempted_for, record.preempted_tokens, strict=True
        ):
            assert wanted_by in lengths
            before = [past + new for who, _, new, past, step in shares if who == name and step < record.step]
            assert tokens <= max(before, default=lengths[name] - 1), "it gave up no more than it had"


def _shares(record) -> list[tuple[str, str, int, int, int]]:
    columns = zip(record.request_ids, record.kinds, record.new_tokens, record.past_tokens, strict=True)
    return [(*share, record.step) for share in columns]


def test_time_of_the_device_and_its_gaps_sum_to_the_wall_time():
    for overlap in (False, True):
        simulation = Simulation(overlap=overlap, max_num_batched_tokens=8)
        simulation.receive(*(ask(f"r{i}", [i] * (5 + 3 * i), 6 + i) for i in range(4)))
        begin_ns = simulation.clock.now_ns
        simulation.drain()
        records = simulation.published.records
        busy_ns = sum(record.gap_ns + record.device_ns for record in records)
        assert records[0].begin_ns + busy_ns == simulation.runner.free_ns
        assert abs(records[0].begin_ns - begin_ns) <= 2 * simulation.clock.tick_ns


@pytest.mark.parametrize(
    ("reason", "bounds"),
    [
        ("batch_cap", {"max_num_seqs": 1}),
        ("token_budget", {"max_num_batched_tokens": 12}),
        ("kv_blocks", {"num_blocks": 6}),
        ("policy", {"policy": "static"}),
        ("policy", {"max_long_prefills": 1, "long_prefill_tokens": 8, "max_num_batched_tokens": 10}),
        ("leader", {"max_num_batched_tokens": 8}),
        ("grammar", {}),
        ("step", {}),
    ],
)
def test_a_wait_is_booked_to_its_reason(reason, bounds):
    simulation = Simulation(**bounds)
    second = ask("second", [2] * 12, 2)
    if reason == "leader":
        second = ask("second", [1] * 12, 2, fork_of="first")
    if reason == "grammar":
        simulation.model.preparations["second"] = SimulatedPreparation(simulation.clock, 7_000_000)
    comes_later = reason == "step" or bounds.get("policy") == "static"
    simulation.receive(ask("first", [1] * 12, 8), *([] if comes_later else [second]))
    simulation.step()
    if comes_later:
        simulation.step()
        began_ns = simulation.engine._last_turn.begin_ns
        simulation.receive(ask("second", [2] * 12, 2, began_ns if reason == "step" else simulation.clock()))
    simulation.drain()
    waits = simulation.published.ended["second"].waits
    assert max(waits, key=waits.get) == reason and waits[reason] >= simulation.steps.step_ns


def test_a_step_tells_how_many_are_held_until_the_runner_is_ready_for_them():
    simulation = Simulation()
    simulation.model.preparations["held"] = SimulatedPreparation(simulation.clock, 4_000_000)
    simulation.receive(ask("runs", [1] * 8, 9), ask("held", [2] * 8, 2))
    simulation.drain()
    told = [record.refusals.get("grammar", 0) for record in simulation.published.records]
    assert told == [1] * sum(told) + [0] * (len(told) - sum(told)) and 0 < sum(told) < len(told)


def test_a_preempted_request_waits_for_what_holds_up_the_head_of_the_line():
    simulation = Simulation(num_blocks=7, prefix_caching=False)
    simulation.receive(ask("old", [1] * 8, 12), ask("new", [2] * 8, 12))
    simulation.drain()
    ended = simulation.published.ended["new"]
    assert ended.waits["kv_blocks"] == ended.ledger[Account.MEMORY_PREEMPTED] > 0
    assert ended.ledger[Account.MEMORY_BLOCKED] == 0


def test_who_needed_the_blocks_of_a_preempted_request_is_named_and_what_it_lost():
    growing = Simulation(num_blocks=6, prefix_caching=False)
    growing.receive(ask("old", [1] * 8, 8), ask("new", [2] * 7, 12))
    growing.drain()
    first = next(record for record in growing.published.records if record.preempted_ids)
    assert (first.preempted_ids, first.preempted_for) == (["new"], ["old"])
    before = [share for record in growing.published.records[: first.step] for share in _shares(record)]
    _, _, new, past, _ = [share for share in before if share[0] == "new"][-1]
    assert first.preempted_tokens == [past + new]
    displaced = Simulation(num_blocks=8, policy="priority")
    displaced.receive(ask("low", [1] * 20, 8, priority=5))
    displaced.step()
    displaced.receive(ask("high", [2] * 20, 8, displaced.clock(), priority=0))
    displaced.drain()
    first = next(record for record in displaced.published.records if record.preempted_ids)
    assert (first.preempted_ids, first.preempted_for) == (["low"], ["high"])
    assert first.preempted_tokens == [20]


def test_a_request_that_cannot_grow_and_is_the_last_in_rank_gives_way_to_itself():
    simulation = Simulation(num_blocks=7, prefix_caching=False)
    simulation.receive(ask("old", [1] * 8, 12), ask("new", [2] * 8, 12))
    simulation.drain()
    causes = {pair for r in simulation.published.records for pair in zip(r.preempted_ids, r.preempted_for, strict=True)}
    assert ("new", "new") in causes
    assert simulation.published.tokens["new"] == sequential([2] * 8, 12)


def test_prefixes_computed_by_others_during_a_preemption_count_as_cached_once():
    """Preempted within its prompt; meanwhile another request computes the whole of it."""
    simulation = Simulation(num_blocks=14, max_num_batched_tokens=12, max_prefill_chunk_tokens=6, policy="priority")
    prompt = [7] * 30
    simulation.receive(ask("low", prompt, 3, priority=5))
    simulation.step()
    simulation.receive(ask("high", [*prompt, 1, 2, 3], 15, simulation.clock(), priority=0))
    simulation.drain()
    ended = simulation.published.ended["low"]
    assert ended.preemptions == 1 and ended.cached_tokens > 0
    assert ended.cached_tokens + ended.computed_tokens == len(prompt) + 3 - 1


def test_the_record_of_a_step_lists_its_batch_as_it_was():
    simulation = Simulation(block_size=16)
    simulation.receive(ask("a", [1] * 8, 6), ask("b", [2] * 8, 12))
    simulation.drain()
    steps = simulation.published.records
    assert [record.request_ids for record in steps] == [["a", "b"]] * 6 + [["b"]] * 6
    assert [record.past_tokens for record in steps[1:6]] == [[8 + i, 8 + i] for i in range(5)]
    assert all(set(record.kinds) == {"decode"} and set(record.new_tokens) == {1} for record in steps[1:])
