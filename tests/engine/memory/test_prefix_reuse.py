"""What broke other small engines: prompts cached whole, prompts of whole blocks, twins, and aborts anywhere."""

import pytest

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.messages import Abort, Submit
from sojourn.engine.sampling import SamplingParams
from tests.engine.simulated import Simulation, sequential
from tests.further import further

SIZE = 4


def ask(name: str, prompt: list[int], max_tokens: int = 3, **more) -> Submit:
    return Submit(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), 0, **more)


@pytest.mark.parametrize("length", [1, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 5 * SIZE, 5 * SIZE + 1])
def test_a_prompt_that_is_cached_whole_computes_its_last_block_for_the_next_token(length):
    simulation, prompt = Simulation(), list(range(length))
    for name in ("cold", "warm", "hot"):
        simulation.receive(ask(name, prompt))
        simulation.drain()
        assert simulation.published.tokens[name] == sequential(prompt, 3)
    simulation.check_idle()
    for name in ("warm", "hot"):
        assert simulation.published.ended[name].cached_tokens == (length - 1) // SIZE * SIZE


@pytest.mark.parametrize("chunk", [None, 1, 3, SIZE])
def test_twins_that_compute_the_same_prompt_at_the_same_time_end_with_one_copy(chunk):
    simulation, prompt = Simulation(max_prefill_chunk_tokens=chunk), list(range(4 * SIZE + 1))
    simulation.receive(*[ask(f"r{i}", prompt, 3) for i in range(4)])
    simulation.drain()
    simulation.check_idle()
    assert all(simulation.published.tokens[f"r{i}"] == sequential(prompt, 3) for i in range(4))
    assert simulation.scheduler.pool.counts().reusable == 4  # the full blocks, once


def test_a_block_under_a_twins_is_not_promised_to_anybody():
    """The first of two twins is gone while the second goes on below the blocks that the first had cached."""
    simulation, prompt = Simulation(num_blocks=12, max_num_batched_tokens=64), list(range(12))
    simulation.receive(ask("short", prompt, 1), ask("long", prompt, 20))
    for _ in range(6):
        simulation.step()
    counts = simulation.scheduler.pool.counts()
    assert counts.reusable == 0  # what the long one reads on
    simulation.receive(ask("big", [9] * 30, 2))  # takes all that is promised
    simulation.drain()
    simulation.check_idle()
    assert simulation.published.tokens["big"] == sequential([9] * 30, 2)
    assert simulation.published.tokens["long"] == sequential(prompt, 20)


def test_what_is_matched_is_not_evicted_for_the_rest_of_the_same_request():
    simulation, prompt = Simulation(num_blocks=6), list(range(13))
    simulation.receive(ask("first", prompt, 1))
    simulation.drain()
    simulation.receive(ask("other", [7] * 8, 1))  # two of the three cached blocks and the free ones are left
    simulation.drain()
    longer = [*prompt, *[5] * 8]
    simulation.receive(ask("longer", longer, 2))  # needs all six blocks
    simulation.drain()
    simulation.check_idle()
    assert simulation.published.tokens["longer"] == sequential(longer, 2)
    assert simulation.published.ended["longer"].cached_tokens == 12


def test_a_preempted_request_finds_what_it_had_computed_and_computes_the_rest_again():
    simulation = Simulation(num_blocks=7)
    simulation.receive(ask("old", [1] * 8, 12), ask("new", [2] * 8, 12))
    simulation.drain()
    simulation.check_idle()
    ended = simulation.published.ended["new"]
    assert ended.preemptions > 0 and ended.cached_tokens == 0  # of its prompt, when it came
    assert 0 < ended.recomputed_tokens < 8  # less than its prompt
    assert simulation.published.tokens["new"] == sequential([2] * 8, 12)


def test_a_conversation_computes_only_what_its_last_turn_added():
    simulation, history = Simulation(128), [3] * 10
    for turn in range(4):
        simulation.receive(ask(f"turn{turn}", history, 9))
        simulation.drain()
        ended = simulation.published.ended[f"turn{turn}"]
        if turn:
            # All but the last token of the turn before was computed, and its full blocks are there.
            assert ended.cached_tokens == (len(history) - 5 - 1) // SIZE * SIZE
        history = history + simulation.published.tokens[f"turn{turn}"] + [turn] * 5
    simulation.check_idle()


@pytest.mark.parametrize("policy", ["fcfs", *further("priority", "fair-share", "static", "prefill-first")])
@pytest.mark.parametrize("step", range(16))
def test_an_abort_of_any_state_at_any_step_leaves_no_trace(step, policy):
    """Waiting, prefilling, decoding, preempted, held behind a long prompt, following a leader: each is aborted once."""
    shared = list(range(9))

    def start() -> Simulation:
        simulation = Simulation(
            10, policy=policy, max_num_batched_tokens=6, max_num_seqs=3, max_long_prefills=1, long_prefill_tokens=10
        )
        simulation.receive(
            ask("a", [*shared, 1], 8, priority=1), ask("b", [*shared, *range(9)], 6, tenant="t"),
            ask("c", [2] * 18, 3, priority=1), ask("d", [2] * 18, 3, fork_of="c"), ask("e", [5] * 5, 5, fork_of="gone"),
        )  # fmt: skip
        for now in range(step):
            if now == 4:
                simulation.receive(ask("late", [*shared, 4], 4, priority=0))
            if simulation.engine.has_work:
                simulation.step()
        return simulation

    prompts = {name: r.token_ids[: r.prompt_tokens] for name, r in start().scheduler.requests.items()}
    for name in prompts:
        simulation = start()
        max_tokens = {n: r.sampling.max_tokens for n, r in simulation.scheduler.requests.items()}
        simulation.receive(Abort(name))
        simulation.check()
        simulation.drain()
        simulation.check_idle()
        assert simulation.published.ended[name].reason == "abort"
        for other in prompts.keys() - {name}:
            assert simulation.published.tokens[other] == sequential(prompts[other], max_tokens[other])


def test_blocks_that_would_come_free_are_counted_as_they_are_shared():
    pool = BlockPool(8, 1)
    first = pool.allocate(3)
    pool.take(first[:2])
    both, one = [first, first[:2]], [first]
    assert pool.available == 5
    assert pool.available_without(one, []) == 6  # the other still reads two
    assert pool.available_without(both, []) == 8
    assert pool.available_without(both, first[:1]) == 7  # ... and the next would read one of them
    assert pool.available_without([], first[:1]) == 5
