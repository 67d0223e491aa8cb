"""A step that is launched before the one before it is read changes no token, loses no block and no nanosecond."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.engine.messages import Abort, Submit
from sojourn.engine.request.policies import POLICIES
from sojourn.engine.sampling import Grammar, SamplingParams
from sojourn.metrics.ledger import Account
from tests.engine.harness import drain, generate, hand_over, make_engine, submit
from tests.engine.request.test_metamorphic import tokens_of
from tests.engine.request.test_metamorphic import traffic as real_traffic
from tests.engine.simulated import Simulation, sequential


def ask(name: str, prompt: list[int], max_tokens: int, encoded_ns: int = 0, fork_of: str | None = None, **sampling):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, **sampling)
    return Submit(name, prompt, sampling, encoded_ns, fork_of=fork_of)


def says(message: Submit) -> list[int]:
    """What the simulated model answers to a request that nobody disturbs."""
    tokens = sequential(message.prompt_token_ids, message.sampling.max_tokens)
    stops = [index for index, token in enumerate(tokens) if token in message.sampling.stop_token_ids]
    return tokens[: stops[0] + 1] if stops else tokens


@st.composite
def traffic(draw) -> list[tuple[str, object]]:
    """Arrivals, aborts and steps. Some requests share a beginning, fork another, stop early or show the host each
    token before the next is drawn."""
    dice = random.Random(draw(st.integers(0, 2**32)))
    shared, events, names = [dice.randrange(50) for _ in range(13)], [], []
    for index in range(draw(st.integers(1, 14))):
        prompt = shared[: dice.choice([0, 8, 13])] + [dice.randrange(50) for _ in range(dice.randint(1, 16))]
        wishes = {"stop_token_ids": dice.sample(range(50), dice.choice([0, 0, 6]))}
        if dice.random() < 0.25:
            wishes["bad_words"] = [[60, 61]]
        name, leader = f"r{index}", None
        if names and dice.random() < 0.3:
            leader = dice.choice(names)
            prompt = next(e.prompt_token_ids for kind, e in events if kind == "submit" and e.request_id == leader)
        message = ask(name, prompt, dice.randint(1, 16), fork_of=leader, **wishes)
        names.append(name)
        events += [("submit", message)] + [("step", None)] * dice.choice([0, 0, 1, 2, 5])
        if dice.random() < 0.15:
            events.append(("abort", dice.choice(names)))
    return events


def play(events: list[tuple[str, object]], **settings) -> Simulation:
    simulation = Simulation(**settings)
    for kind, what in events:
        if kind == "submit":
            simulation.receive(Submit(*(getattr(what, f) for f in ("request_id", "prompt_token_ids", "sampling")),
                                      simulation.clock(), fork_of=what.fork_of))  # fmt: skip
        elif kind == "abort":
            simulation.receive(Abort(what))
        elif simulation.engine.has_work:
            simulation.step()
    simulation.drain()
    simulation.check_idle()
    return simulation


@settings(max_examples=120, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=traffic(),
    num_blocks=st.sampled_from([12, 16, 64]),
    policy=st.sampled_from(sorted(POLICIES)),
    chunk=st.sampled_from([5, 32]),
    max_num_seqs=st.sampled_from([3, 8]),
    prefix_caching=st.booleans(),
)
def test_random_traffic_gets_the_tokens_that_it_gets_alone(
    events, num_blocks, policy, chunk, max_num_seqs, prefix_caching
):
    """Aborts, preemptions, forks, prefix hits, stop tokens and the host's own controls, under every policy."""
    simulation = play(
        events, num_blocks=num_blocks, policy=policy, max_num_batched_tokens=chunk, max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching, overlap=True,
    )  # fmt: skip
    published = simulation.published
    for message in (what for kind, what in events if kind == "submit"):
        tokens, expected = published.tokens.get(message.request_id, []), says(message)
        if published.ended[message.request_id].reason == "abort":
            assert tokens == expected[: len(tokens)]
        else:
            assert tokens == expected
    assert_closed(simulation)


def assert_closed(simulation: Simulation) -> None:
    """Every nanosecond is booked: of each request up to each of its tokens, and of each step."""
    published = simulation.published
    submitted_ns = simulation.submitted_ns
    for name, told in published.ledgers.items():
        for committed_ns, ledger in told:
            assert sum(ledger) == committed_ns - submitted_ns[name] and min(ledger) >= 0, name
    idle_since_ns = None
    for record in published.records:
        assert sum(record.stages) == record.end_ns - record.begin_ns and min(record.stages) >= 0
        assert record.gap_ns >= 0 and record.overrun_tokens <= sum(record.new_tokens)
        idle_since_ns = record.begin_ns if idle_since_ns is None else idle_since_ns
        idle_since_ns += record.gap_ns + record.device_ns + record.draft_ns
        assert idle_since_ns <= record.end_ns


def test_a_decode_is_launched_before_the_last_is_read_and_the_host_costs_nothing():
    ledgers = {}
    for overlap in (False, True):
        simulation = Simulation(overlap=overlap)
        simulation.receive(ask("a", [1] * 8, 12), ask("b", [2] * 8, 12))
        most = 0
        while simulation.engine.has_work:
            simulation.step()
            most = max(most, len(simulation.runner.under_way))
        simulation.engine.flush()
        ledgers[overlap] = simulation.published.ended["a"].ledger
        gaps = [record.gap_ns for record in simulation.published.records[2:]]
        assert most == overlap
        assert all(gap == 0 for gap in gaps) if overlap else all(gap > 0 for gap in gaps)
    for account in (Account.COMPUTE_PREFILL, Account.COMPUTE_DECODE):
        assert ledgers[True][account] == ledgers[False][account]
    assert ledgers[True][Account.COMPUTE_HOST] < ledgers[False][Account.COMPUTE_HOST] / 3


def test_a_token_in_flight_when_its_request_stopped_is_counted_but_not_sent():
    prompt = [3] * 6
    stop = sequential(prompt, 9)[4]
    message = ask("a", prompt, 9, stop_token_ids=[stop])
    simulation = play([("submit", message)], overlap=True)
    published = simulation.published
    assert published.tokens["a"] == says(message) and published.ended["a"].reason == "stop"
    assert published.ended["a"].computed_tokens == len(prompt) + len(says(message)) - 1
    assert [record.overrun_tokens for record in published.records][-2:] == [0, 1]
    assert published.records[-1].request_ids == ["a"]


def test_the_last_token_that_a_request_may_have_is_followed_by_no_step():
    simulation = play([("submit", ask("a", [3] * 6, 9))], overlap=True)
    assert len(simulation.published.records) == 9
    assert not any(record.overrun_tokens for record in simulation.published.records)


@pytest.mark.parametrize("wish", [{"bad_words": [[60, 61]]}, {"lz_penalty": 1.0}], ids=["bad words", "lz penalty"])
def test_a_request_whose_next_draw_needs_the_last_token_is_never_ahead_of_it(wish):
    simulation = Simulation(overlap=True)
    simulation.receive(ask("a", [1] * 8, 6, **wish), ask("b", [2] * 8, 9))
    simulation.drain()
    assert all(record.gap_ns > 0 for record in simulation.published.records if "a" in record.request_ids)
    assert simulation.published.records[-1].gap_ns == 0  # `b` alone is ahead again


def test_a_block_is_found_by_its_tokens_and_so_not_before_the_last_of_them_is_known():
    simulation, history = Simulation(128, overlap=True), [3] * 10
    for turn in range(4):
        simulation.receive(ask(f"turn{turn}", history, 9))
        simulation.drain()
        if turn:  # all but the last token of the turn before was computed, and its full blocks are there
            assert simulation.published.ended[f"turn{turn}"].cached_tokens == (len(history) - 5 - 1) // 4 * 4
        history = history + simulation.published.tokens[f"turn{turn}"] + [turn] * 5
    simulation.check_idle()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_prefill_chunk_tokens": 7, "block_size": 5},
        {"num_kv_blocks": 10, "max_model_len": 150, "prefix_caching": False},
        {"attention_backend": "torch", "fused_operations": "off", "policy": "prefill-first"},
    ],
    ids=["default", "small steps", "small memory", "reference kernels"],
)
def test_overlap_changes_no_token_of_the_real_engine_and_loses_no_nanosecond(settings, checkpoints):
    """Greedy and seeded requests, forks and prefix hits; `tokens_of` holds ledgers and blocks to their sums."""
    told = {
        overlap: tokens_of(checkpoints["llama"], real_traffic(), together=4, overlap=overlap, **settings)
        for overlap in ("off", "on")
    }
    assert told["on"][0] == told["off"][0]
    assert (told["on"][1] > 0) == (settings.get("num_kv_blocks") == 10), "preempted"


def test_overlap_changes_no_token_of_requests_with_controls_and_grammars():
    word = Grammar("regex", "[a-z]{3,12}")
    controls = [
        {}, {"temperature": 0.8, "seed": 1, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
        {"logit_bias": {5: 3.0}, "logprobs": 2}, {"bad_words": [[7], [8, 9]]}, {"lz_penalty": 0.5},
        {"grammar": word, "ignore_eos": False, "stop_token_ids": [0]}, {"temperature": 1.0, "top_k": 20, "seed": 4},
        {"prompt_logprobs": 1, "min_tokens": 4, "stop_token_ids": [3], "ignore_eos": False},
    ]  # fmt: skip
    told = {}
    for overlap in ("off", "on"):
        engine, published = make_engine("tiny-model", overlap=overlap, max_num_seqs=5, max_num_batched_tokens=32)
        hand_over(engine, [submit(f"r{i}", [5 + i] * (4 + 9 * i), 14, **wishes) for i, wishes in enumerate(controls)])
        drain(engine, check=True)
        told[overlap] = (published.tokens, published.logprobs, published.prompt_logprobs)
        reasons = {name: ended.reason for name, ended in published.ended.items()}
        assert "error" not in reasons.values()
    assert told["on"] == told["off"]


def test_an_overlapped_step_on_a_cpu_never_begins_before_the_last_one_ended(checkpoints):
    _, published = generate(checkpoints["llama"], [[3, 4, 5]] * 3, max_tokens=20, overlap="on")
    ended_ns = published.records[0].begin_ns
    for record in published.records:
        assert record.gap_ns >= 0 and record.device_ns > 0
        ended_ns += record.gap_ns + record.device_ns
    assert published.records[-1].end_ns - ended_ns < 50_000_000  # the last step's own way through the host
