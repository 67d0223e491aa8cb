"""Requests that share a prompt: one computes it, the others read it, and nobody writes what somebody else reads."""

import pytest

from sojourn.engine.messages import Abort, Submit
from sojourn.engine.sampling import SamplingParams
from sojourn.metrics.ledger import Account
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.simulated import Simulation, sequential

SIZE = 4  # of a block in the simulation


def fork(request_id: str, prompt: list[int], max_tokens: int = 6, of: str | None = None, **sampling) -> Submit:
    return Submit(request_id, prompt, SamplingParams(max_tokens=max_tokens, temperature=0, **sampling), 0, fork_of=of)


def family(length: int, siblings: int, max_tokens: int = 6) -> list[Submit]:
    prompt = list(range(length))
    return [fork("leader", prompt, max_tokens)] + [fork(f"f{i}", prompt, max_tokens, "leader") for i in range(siblings)]


def expected(length: int, max_tokens: int = 6) -> list[int]:
    return sequential(list(range(length)), max_tokens)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 2, SIZE - 1, SIZE, SIZE + 1, 2 * SIZE, 2 * SIZE + 1, 3 * SIZE - 1])
def test_a_shared_prompt_is_computed_once_whatever_its_length(length, prefix_caching):
    simulation = Simulation(prefix_caching=prefix_caching)
    simulation.receive(*family(length, 3))
    simulation.drain()
    simulation.check_idle()
    ended, tokens = simulation.published.ended, simulation.published.tokens
    assert all(tokens[name] == expected(length) for name in ended)
    assert ended["leader"].computed_tokens == length + 5
    for name in ("f0", "f1", "f2"):
        assert ended[name].cached_tokens == length - 1
        assert ended[name].computed_tokens == 1 + 5  # its last prompt token, for the logits


def test_forks_of_a_running_request_use_its_blocks_and_one_each_of_their_own():
    simulation = Simulation(prefix_caching=False)
    length = 5 * SIZE + 2
    simulation.receive(*family(length, 3, max_tokens=3))
    simulation.step()
    assert simulation.scheduler.pool.counts().active == 6
    simulation.step()
    # Five full blocks are shared; of the four that wrote into the sixth, the last to do so kept the original.
    assert simulation.scheduler.pool.counts().active == 5 + 4


def test_siblings_wait_beside_the_line_and_hold_no_place():
    simulation = Simulation(max_num_seqs=2, max_num_batched_tokens=12)
    simulation.receive(*family(20, 4), fork("stranger", [9] * 3))
    simulation.step()
    simulation.step()
    assert [request.id for request in simulation.scheduler.running] == ["leader", "stranger"]
    assert simulation.last_step_record().refusals == {"leader": 4}
    simulation.drain()
    simulation.check_idle()


def test_waiting_for_the_leader_is_queueing_even_while_the_line_waits_for_memory():
    simulation = Simulation(num_blocks=12, max_num_batched_tokens=4, max_num_seqs=4)
    simulation.receive(*family(24, 1), fork("big", [8] * 32))
    simulation.drain()
    ledgers = {name: ended.ledger for name, ended in simulation.published.ended.items()}
    assert ledgers["big"][Account.MEMORY_BLOCKED] > 5 * simulation.steps.step_ns
    assert ledgers["f0"][Account.REQUEST_QUEUE] > 5 * simulation.steps.step_ns


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [3 * SIZE - 1, 3 * SIZE])
def test_siblings_whose_prompt_fills_the_pool_have_their_turns(length, prefix_caching):
    simulation = Simulation(num_blocks=3, prefix_caching=prefix_caching)
    simulation.receive(*family(length, 3, max_tokens=1))
    simulation.drain()
    simulation.check_idle()
    assert all(simulation.published.tokens[name] == expected(length, 1) for name in ("leader", "f0", "f1", "f2"))


def test_siblings_of_a_leader_that_ends_with_its_prompt_still_have_its_blocks():
    simulation = Simulation(prefix_caching=False, max_num_seqs=1)
    messages = family(10, 3)
    simulation.receive(fork("leader", list(range(10)), 1), *messages[1:])
    simulation.drain()
    simulation.check_idle()
    assert all(simulation.published.ended[f"f{i}"].cached_tokens == 9 for i in range(3))
    assert all(simulation.published.tokens[f"f{i}"] == expected(10) for i in range(3))


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("gone", ["leader", "f0", "f1", "all"])
def test_an_abort_at_any_point_leaves_the_others_their_tokens(steps, gone):
    simulation = Simulation(prefix_caching=False, max_num_batched_tokens=4, max_num_seqs=2)
    simulation.receive(*family(10, 3))
    for _ in range(steps):
        simulation.step()
    names = ["leader", "f0", "f1", "f2"]
    aborted = names if gone == "all" else [gone]
    simulation.receive(*[Abort(name) for name in aborted])
    simulation.drain()
    simulation.check_idle()
    for name in names:
        ended = simulation.published.ended[name]
        assert ended.reason == ("abort" if name in aborted else "length")
        assert ended.reason == "abort" or simulation.published.tokens[name] == expected(10)


def test_the_first_sibling_of_an_aborted_leader_leads_the_others():
    simulation = Simulation(prefix_caching=False, max_num_batched_tokens=4)
    simulation.receive(*family(10, 3))
    simulation.step()
    simulation.receive(Abort("leader"))
    simulation.drain()
    assert [simulation.published.ended[f"f{i}"].cached_tokens for i in range(3)] == [0, 9, 9]


def test_a_late_fork_reads_a_decoding_leader_and_goes_alone_after_its_end():
    simulation = Simulation(prefix_caching=False)
    simulation.receive(fork("leader", list(range(10)), 6))
    simulation.step()
    simulation.step()
    simulation.receive(fork("late", list(range(10)), 6, "leader"))
    simulation.drain()
    simulation.receive(fork("too late", list(range(10)), 6, "leader"))
    simulation.drain()
    simulation.check_idle()
    ended, tokens = simulation.published.ended, simulation.published.tokens
    assert (ended["late"].cached_tokens, ended["too late"].cached_tokens) == (9, 0)
    assert tokens["late"] == tokens["too late"] == expected(10)


def test_a_request_that_names_itself_or_nobody_goes_alone():
    simulation = Simulation()
    simulation.receive(fork("self", list(range(10)), of="self"), fork("orphan", list(range(10)), of="nobody"))
    simulation.drain()
    simulation.check_idle()
    assert simulation.published.tokens["self"] == simulation.published.tokens["orphan"] == expected(10)


def test_a_request_with_another_prompt_or_salt_shares_nothing_with_the_one_it_names():
    simulation = Simulation(prefix_caching=False)
    simulation.receive(fork("leader", list(range(10))), fork("other", [7] * 10, of="leader"))
    simulation.receive(
        Submit("salted", list(range(10)), SamplingParams(max_tokens=6, temperature=0), 0, "salt", fork_of="leader")
    )
    simulation.drain()
    assert simulation.published.ended["other"].cached_tokens == simulation.published.ended["salted"].cached_tokens == 0


def test_waiting_siblings_give_up_the_leaders_blocks_where_memory_runs_short():
    simulation = Simulation(num_blocks=12, prefix_caching=False, max_num_seqs=1)
    simulation.receive(fork("leader", list(range(30)), 1), fork("fork", list(range(30)), 6, "leader"))
    simulation.receive(fork("long", [5] * 40, 4))
    simulation.step()
    simulation.scheduler.policy.queue.remove(simulation.scheduler.requests["long"])  # in front of the fork, for once
    simulation.scheduler.requests["long"].arrival_index = -1
    simulation.scheduler.policy.queue.push(simulation.scheduler.requests["long"])
    simulation.step()
    assert [request.id for request in simulation.scheduler.running] == ["long"]
    simulation.drain()
    simulation.check_idle()
    assert simulation.published.ended["fork"].cached_tokens == 0
    assert simulation.published.tokens["fork"] == expected(30)


@pytest.mark.parametrize("victim", ["leader", "fork"])
def test_preemption_after_forking_takes_nothing_from_the_other(victim):
    """Priority throws one of the two out, just after they parted."""
    simulation = Simulation(prefix_caching=False, policy="priority", max_num_seqs=2)
    prompt, greedy = list(range(10)), SamplingParams(max_tokens=6, temperature=0)
    low = {"leader": 0, "fork": 0} | {victim: 1}
    simulation.receive(
        Submit("leader", prompt, greedy, 0, priority=low["leader"]),
        Submit("fork", prompt, greedy, 0, priority=low["fork"], fork_of="leader"),
    )
    simulation.step()
    simulation.step()
    simulation.receive(Submit("urgent", [3] * 5, greedy, 0, priority=-1))
    simulation.drain()
    simulation.check_idle()
    ended = simulation.published.ended
    assert {name for name in ended if ended[name].preemptions} == {victim}
    assert simulation.published.tokens["leader"] == simulation.published.tokens["fork"] == expected(10)


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_forks_on_the_real_engine_draw_what_they_would_alone(length, prefix_caching, checkpoints):
    prompt = [(7 * i) % 300 + 3 for i in range(length)]
    settings = {"prefix_caching": prefix_caching, "max_num_seqs": 3}
    alone = {}
    for seed in range(4):
        engine, published = make_engine(checkpoints["llama"], **settings)
        hand_over(engine, [submit("one", prompt, 20, temperature=1.0, seed=seed)])
        drain(engine)
        alone[seed] = published.tokens["one"]
    engine, published = make_engine(checkpoints["llama"], **settings)
    batch = [submit(f"r{seed}", prompt, 20, temperature=1.0, seed=seed) for seed in range(4)]
    hand_over(engine, [batch[0], *(_fork_of(message, "r0") for message in batch[1:])])
    drain(engine, check=True)
    assert {seed: published.tokens[f"r{seed}"] for seed in range(4)} == alone
    assert [published.ended[f"r{seed}"].cached_tokens for seed in range(1, 4)] == [length - 1] * 3


def test_scores_of_a_prompt_are_computed_once_for_its_forks(checkpoints):
    prompt = [(7 * i) % 300 + 3 for i in range(40)]
    engine, published = make_engine(checkpoints["llama"])
    batch = [submit(f"r{i}", prompt, 4, prompt_logprobs=2) for i in range(3)]
    hand_over(engine, [batch[0], *(_fork_of(message, "r0") for message in batch[1:])])
    hand_over(engine, [_fork_of(submit("more", prompt, 4, prompt_logprobs=5), "r0")])
    drain(engine, check=True)
    scores = published.prompt_logprobs
    assert len(scores["r0"]) == 39 and scores["r0"] == scores["r1"] == scores["r2"]
    assert published.ended["r1"].cached_tokens == 39
    assert published.ended["more"].cached_tokens == 0 and len(scores["more"][0].top) == 5  # the leader has fewer


def _fork_of(message: Submit, leader: str) -> Submit:
    return Submit(message.request_id, message.prompt_token_ids, message.sampling, message.encoded_ns, fork_of=leader)


def test_siblings_keep_the_leaders_blocks_where_giving_them_up_would_help_nobody():
    simulation = Simulation(num_blocks=12, prefix_caching=False, max_num_seqs=2)
    prompt = list(range(30))
    simulation.receive(fork("leader", prompt, 6), fork("big", [5] * 40, 1), fork("fork", prompt, 3, "leader"))
    for _ in range(3):
        simulation.step()  # the big one is before the fork and does not fit, whatever the fork gives up
    simulation.receive(Abort("big"))
    simulation.drain()
    simulation.check_idle()
    assert simulation.published.ended["fork"].cached_tokens == 29


def test_siblings_hash_nothing_of_the_prompt_that_they_share():
    """Many of them fill their next blocks in the same step, in which each would hash the whole prompt."""
    simulation = Simulation()
    simulation.receive(*family(5 * SIZE + 1, 2, max_tokens=9))
    leader, first, second = (simulation.scheduler.requests[name] for name in ("leader", "f0", "f1"))
    simulation.step()
    for fork in (first, second):
        assert all(mine is other for mine, other in zip(fork._hashes[:5], leader._hashes, strict=False))
        assert len(fork._hashes) >= 5
    simulation.drain()
    assert simulation.published.tokens["f1"] == expected(5 * SIZE + 1, 9)
