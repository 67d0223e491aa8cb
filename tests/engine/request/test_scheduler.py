"""The loop on a simulated device: what a step holds, and which account each nanosecond is booked to."""

import pytest

from sojourn.engine.messages import Abort, Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.compute.cost_model import request_flops
from sojourn.metrics.compute.step_costs import StepCosts
from sojourn.metrics.ledger import Account
from sojourn.metrics.steps import Steps
from tests.engine.simulated import SHAPE, Simulation, sequential


def message(request_id: str, prompt: list[int], max_tokens: int, encoded_ns: int = 0, **sampling) -> Submit:
    return Submit(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, **sampling), encoded_ns)


def booked(ledger: list[int]) -> int:
    return sum(ledger)


def test_decodes_go_before_prompt_chunks_so_that_a_long_prompt_stalls_nobody():
    simulation = Simulation(max_num_batched_tokens=8)
    simulation.receive(message("chat", [1, 2, 3], 20))
    simulation.step()
    simulation.receive(message("long", list(range(40)), 2))
    for _ in range(5):
        simulation.step()
        step = simulation.last_step_record()
        assert step.kinds[0] == "decode" and step.new_tokens[0] == 1
        assert step.new_tokens[1] == 7


def test_each_refusal_has_its_reason():
    cap = Simulation(max_num_seqs=1)
    cap.receive(message("a", [1] * 4, 4), message("b", [1] * 4, 4), message("c", [1] * 4, 4))
    cap.step()
    assert cap.last_step_record().refusals == {"batch_cap": 1, "behind_head": 1}
    budget = Simulation(max_num_batched_tokens=4)
    budget.receive(message("a", [1] * 4, 4), message("b", [1] * 4, 4))
    budget.step()
    assert budget.last_step_record().refusals == {"token_budget": 1}
    memory = Simulation(num_blocks=5)
    memory.receive(message("a", [1] * 12, 4), message("b", [2] * 12, 4))
    memory.step()
    assert memory.last_step_record().refusals == {"kv_blocks": 1}


@pytest.mark.parametrize(
    ("bounds", "account"),
    [
        ({"max_num_seqs": 1}, Account.REQUEST_QUEUE),
        ({"num_blocks": 6}, Account.MEMORY_BLOCKED),
    ],
)
def test_waiting_is_booked_to_the_reason_of_the_refusal(bounds, account):
    simulation = Simulation(**bounds)
    simulation.receive(message("first", [1] * 12, 8), message("second", [2] * 12, 2))
    simulation.drain()
    ledger = simulation.published.ended["second"].ledger
    waited = {Account.REQUEST_QUEUE, Account.MEMORY_BLOCKED}
    assert ledger[account] > 7 * simulation.steps.step_ns
    assert all(ledger[other] == 0 for other in waited - {account})


def test_a_request_that_arrives_during_a_step_is_admitted_after_it():
    simulation = Simulation()
    simulation.receive(message("first", [1] * 8, 8))
    simulation.step()
    turn = simulation.engine._last_turn
    begin, end = turn.begin_ns, turn.end_ns
    handed_over = begin + (end - begin) // 2
    simulation.receive(message("second", [2] * 8, 1, encoded_ns=handed_over))
    simulation.drain()
    ledger = simulation.published.ended["second"].ledger
    assert ledger[Account.REQUEST_QUEUE] == end - handed_over
    assert 0 < ledger[Account.REQUEST_ADMISSION] <= 2 * simulation.clock.tick_ns


def test_delay_by_a_neighbours_prompt_is_booked_as_interference_and_not_without_one():
    quiet, busy = Simulation(), Simulation()
    for simulation in (quiet, busy):
        simulation.receive(message("chat", [1, 2, 3], 10))
        simulation.step()
    busy.receive(message("long", list(range(100)), 1))
    for simulation in (quiet, busy):
        simulation.drain()
    assert quiet.published.ended["chat"].ledger[Account.REQUEST_INTERFERENCE] == 0
    delayed = busy.published.ended["chat"].ledger[Account.REQUEST_INTERFERENCE]
    assert delayed > 50 * busy.steps.token_ns  # most of the hundred tokens' time


def test_a_delay_planted_in_the_device_is_booked_to_the_work_that_it_held_up():
    plain, slow = Simulation(), Simulation()
    slow.steps.step_ns += 5_000_000
    for simulation in (plain, slow):
        simulation.receive(message("a", [1] * 8, 10))
        simulation.drain()
    before, after = plain.published.ended["a"].ledger, slow.published.ended["a"].ledger
    growth = {Account(i): b - a for i, (a, b) in enumerate(zip(before, after, strict=True)) if b != a}
    assert growth == {Account.COMPUTE_PREFILL: 5_000_000, Account.COMPUTE_DECODE: 9 * 5_000_000}


def test_recompute_and_the_wait_before_it_are_memorys():
    simulation = Simulation(num_blocks=7, prefix_caching=False)
    simulation.receive(message("old", [1] * 8, 12), message("new", [2] * 8, 12))
    simulation.drain()
    ended = simulation.published.ended
    assert ended["old"].preemptions == 0 and ended["new"].preemptions > 0
    assert ended["new"].ledger[Account.MEMORY_PREEMPTED] > 0
    assert ended["new"].ledger[Account.MEMORY_RECOMPUTE] > 0
    assert ended["new"].recomputed_tokens > 0
    assert simulation.published.tokens["new"] == sequential([2] * 8, 12)


def test_a_chunk_is_either_computed_again_or_for_the_first_time():
    """A long prompt thrown out half-way: what was there before is recompute, the rest is its own prefill."""
    simulation = Simulation(num_blocks=16, max_num_batched_tokens=3, prefix_caching=False)
    simulation.receive(message("old", [1] * 14, 30))
    for _ in range(6):
        simulation.step()
    simulation.receive(message("new", [2] * 36, 1))
    simulation.drain()
    ended, steps = simulation.published.ended["new"], simulation.published.records
    mine = [
        (kind, new, past) for step in steps
        for name, kind, new, past in zip(step.request_ids, step.kinds, step.new_tokens, step.past_tokens, strict=True)
        if name == "new"
    ]  # fmt: skip
    assert ended.preemptions > 0
    again = [(past, past + new) for kind, new, past in mine if kind == "recompute"]
    first = [(past, past + new) for kind, new, past in mine if kind != "recompute"]
    assert sum(end - begin for begin, end in again) == ended.recomputed_tokens > 0
    assert sorted(p for begin, end in first for p in range(begin, end)) == list(range(36)), "each position once"


def test_flops_of_a_step_hold_the_head_for_every_token_that_is_drawn():
    simulation = Simulation()
    simulation.receive(message("a", [1] * 8, 3))
    simulation.drain()
    expected = [request_flops(SHAPE, 8, 0, 1), request_flops(SHAPE, 1, 8, 1), request_flops(SHAPE, 1, 9, 1)]
    costs = StepCosts(SHAPE)
    assert costs.complete(Steps(simulation.published.records))["flops"].tolist() == expected


def test_time_that_the_loop_forgets_is_left_over_and_not_booked_to_anybody():
    simulation = Simulation()
    simulation.receive(message("a", [1] * 8, 3))
    simulation.step()
    simulation._begin_ns += 7_000_000  # as if something outside every stage had taken so long
    simulation.clock.now_ns += 7_000_000
    simulation.drain()
    committed_ns, ledger = simulation.published.ledgers["a"][-1]
    assert committed_ns - booked(ledger) == 7_000_000


def test_requests_with_different_salts_share_no_blocks():
    simulation = Simulation()
    prompt = list(range(20))
    for name, salt in (("a", ""), ("b", "tenant-1"), ("c", "tenant-1"), ("d", "tenant-2")):
        simulation.receive(Submit(name, prompt, SamplingParams(max_tokens=1, temperature=0), 0, cache_salt=salt))
        simulation.drain()
    assert [simulation.published.ended[name].cached_tokens for name in "abcd"] == [0, 0, 16, 0]


def test_least_recently_used_leaves_are_evicted_first():
    simulation = Simulation(num_blocks=12)
    shared, other = [9] * 16, [5] * 16
    for name, prompt in (("a", [*shared, 1]), ("b", [*other, 1]), ("c", [*shared, 2])):
        simulation.receive(message(name, prompt, 1))
        simulation.drain()
    simulation.receive(message("big", list(range(28)), 1))  # needs more than what is free
    simulation.drain()
    assert sum(step.evicted_blocks for step in simulation.published.records) > 0
    simulation.receive(message("d", [*shared, 3], 1))
    simulation.drain()
    assert simulation.published.ended["d"].cached_tokens == 16  # used last, so kept
    simulation.receive(message("e", [*other, 3], 1))
    simulation.drain()
    assert simulation.published.ended["e"].cached_tokens < 16


@pytest.mark.parametrize("abort_at", range(12))
def test_abort_at_any_point_frees_everything_within_a_step(abort_at):
    simulation = Simulation(num_blocks=12, max_num_batched_tokens=6)
    simulation.receive(*[message(f"r{i}", [i] * 14, 6) for i in range(4)])
    for _ in range(abort_at):
        simulation.step()
    simulation.receive(*[Abort(f"r{i}") for i in range(4)])
    assert not simulation.engine.has_work
    simulation.check()
    simulation.engine.flush()
    assert set(simulation.published.ended) == {f"r{i}" for i in range(4)}
    assert simulation.scheduler.pool.counts().active == 0
