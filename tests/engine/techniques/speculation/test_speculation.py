"""Drafts change no token, lose no block and no nanosecond: in any traffic, under any setting, good drafts or bad."""

import math
import random
from collections import Counter

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sojourn.engine.messages import Submit
from sojourn.engine.request.policies import POLICIES
from sojourn.engine.sampling import Grammar
from sojourn.metrics.ledger import Account
from tests.engine.closure import open_books, open_steps, rows_of, table
from tests.engine.exact_sampling import CHI_SQUARE
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.request.test_metamorphic import tokens_of
from tests.engine.request.test_metamorphic import traffic as real_traffic
from tests.engine.server_process import serving
from tests.engine.simulated import Simulation, sequential
from tests.engine.test_overlap import ask, assert_closed, play, says, traffic
from tests.further import further

PROPOSERS = ("ngram", "early-exit")  # one that only reads, and one that writes behind the known tokens


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=traffic(),
    num_blocks=st.sampled_from([12, 16, 64]),
    policy=st.sampled_from(sorted(POLICIES)),
    budget=st.sampled_from([5, 32]),
    max_num_seqs=st.sampled_from([3, 8]),
    prefix_caching=st.booleans(),
    overlap=st.booleans(),
    knobs=st.fixed_dictionaries({
        "speculation": st.sampled_from(PROPOSERS),
        "speculation_adaptive": st.sampled_from(["on", "off"]),
        "speculation_tokens": st.sampled_from([1, 3, 9]),
    }),
)  # fmt: skip
def test_random_traffic_gets_the_tokens_that_it_gets_without_drafts(
    events, num_blocks, policy, budget, max_num_seqs, prefix_caching, overlap, knobs
):
    """The simulated proposer is right in seven of ten drafts. What it writes ahead would show if anybody read it."""
    simulation = play(
        events, num_blocks=num_blocks, policy=policy, max_num_batched_tokens=budget, max_num_seqs=max_num_seqs,
        prefix_caching=prefix_caching, overlap=overlap, knobs=knobs,
    )  # fmt: skip
    published = simulation.published
    for message in (what for kind, what in events if kind == "submit"):
        tokens, expected = published.tokens.get(message.request_id, []), says(message)
        ended = published.ended[message.request_id]
        if ended.reason == "abort":
            assert tokens == expected[: len(tokens)]
            continue
        assert tokens == expected
        known = len(message.prompt_token_ids) + len(tokens)
        assert ended.cached_tokens + ended.computed_tokens == known - 1
        assert 0 <= ended.accepted_tokens <= ended.drafted_tokens
    for record in published.records:
        assert sum(record.new_tokens) <= record.budget
        assert sum(record.drafted_by_position) == record.drafted_tokens
        assert record.drafted_tokens == sum(
            new - 1 for new, kind in zip(record.new_tokens, record.kinds, strict=True) if kind == "verify"
        )
    assert_closed(simulation)


def test_state_advances_by_accepted_tokens_and_the_ledger_tells_drafting_from_decoding():
    knobs = {"speculation": "early-exit", "speculation_adaptive": "off"}
    simulation = Simulation(knobs=knobs)
    simulation.receive(ask("a", [3] * 6, 40))
    simulation.drain()
    simulation.check_idle()
    ended, records = simulation.published.ended["a"], simulation.published.records
    assert simulation.published.tokens["a"] == sequential([3] * 6, 40)
    assert len(records) < 30 and sum(record.emitted_tokens for record in records) == 40
    assert ended.accepted_tokens == sum(record.accepted_tokens for record in records) == 40 - len(records)
    assert ended.ledger[Account.COMPUTE_DRAFT] == sum(record.draft_ns for record in records) > 0
    assert 0 < ended.rejected_ns < ended.ledger[Account.COMPUTE_DECODE]
    drafted = [sum(each) for each in zip(*(pad(record.drafted_by_position) for record in records), strict=True)]
    accepted = [sum(each) for each in zip(*(pad(record.accepted_by_position) for record in records), strict=True)]
    assert drafted == sorted(drafted, reverse=True) and accepted == sorted(accepted, reverse=True)


def pad(counts: list[int]) -> list[int]:
    return counts + [0] * (16 - len(counts))


def test_right_drafts_end_a_request_in_a_few_steps_and_wrong_ones_cost_no_token():
    for quality, most in ((1.0, 12), (0.0, 40)):
        simulation = Simulation(knobs={"speculation": "ngram", "speculation_adaptive": "off"})
        simulation.model.draft_quality = quality
        simulation.receive(ask("a", [3] * 6, 40))
        simulation.drain()
        assert simulation.published.tokens["a"] == sequential([3] * 6, 40)
        assert len(simulation.published.records) <= most + 8


def test_a_stop_in_the_middle_of_accepted_drafts_drops_the_rest():
    prompt = [3] * 6
    tokens = sequential(prompt, 20)
    for length in range(2, 9):
        stop = tokens[length - 1]
        expected = tokens[: tokens.index(stop) + 1]
        simulation = Simulation(knobs={"speculation": "ngram", "speculation_adaptive": "off"})
        simulation.model.draft_quality = 1.0
        simulation.receive(ask("a", prompt, 20, stop_token_ids=[stop]))
        simulation.drain()
        simulation.check_idle()
        assert simulation.published.tokens["a"] == expected and simulation.published.ended["a"].reason == "stop"
        assert simulation.published.ended["a"].computed_tokens == len(prompt) + len(expected) - 1


def test_drafts_preempt_nobody():
    """Two requests that fit in the pool to their last token; each block for a draft would be one of them."""
    knobs = {"speculation": "early-exit", "speculation_adaptive": "off", "speculation_tokens": 16}
    simulation = Simulation(num_blocks=10, knobs=knobs)
    simulation.receive(ask("a", [1] * 8, 12), ask("b", [2] * 8, 12))
    simulation.drain()
    simulation.check_idle()
    assert not any(record.preempted_ids for record in simulation.published.records)
    assert all(simulation.published.tokens[name] == sequential([n] * 8, 12) for name, n in (("a", 1), ("b", 2)))


def test_speculation_that_fails_falls_to_no_drafts_and_says_why():
    simulation = Simulation(num_blocks=128, knobs={"speculation": "ngram"})
    simulation.model.draft_quality, simulation.steps.token_ns = 0.0, 500_000
    simulation.receive(ask("a", [3] * 6, 300))
    simulation.drain()
    records = simulation.published.records[50:]
    assert sum(record.drafts_wanted for record in records) < len(records) / 16
    assert sum(record.undrafted.get("acceptance", 0) for record in records) > 0.9 * len(records)


def test_a_batch_that_makes_drafts_a_loss_gets_none_though_they_are_right():
    simulation = Simulation(num_blocks=256, knobs={"speculation": "ngram"})
    simulation.model.draft_quality, simulation.steps.token_ns = 0.8, 3_000_000  # three times the rest of a step
    simulation.receive(*[ask(f"r{index}", [index] * 6, 100) for index in range(8)])
    simulation.drain()
    records = simulation.published.records[40:90]
    assert sum(record.drafts_wanted for record in records) < 0.1 * 8 * len(records)
    assert sum(record.undrafted.get("step_time", 0) for record in records) > 0.8 * 8 * len(records)


def test_speculation_that_works_is_used_in_full():
    simulation = Simulation(num_blocks=128, knobs={"speculation": "ngram"})
    simulation.model.draft_quality, simulation.steps.token_ns = 1.0, 1_000
    simulation.receive(ask("a", [3] * 6, 300))
    simulation.drain()
    assert sum(record.drafts_wanted == 4 for record in simulation.published.records) > 60


WORD = Grammar("regex", "([a-z]{1,3} ){3,12}")
CONTROLS = [
    {}, {"temperature": 0.8, "seed": 1, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "presence_penalty": -0.4},
    {"logit_bias": {5: 3.0}, "logprobs": 2}, {"bad_words": [[7], [8, 9]]}, {"lz_penalty": 0.5, "logprobs": 1},
    {"grammar": WORD, "ignore_eos": False, "stop_token_ids": [0]},
    {"grammar": WORD, "ignore_eos": False, "stop_token_ids": [0], "temperature": 1.0, "seed": 8, "lz_penalty": 0.1},
    {"temperature": 1.0, "top_k": 20, "seed": 4}, {"temperature": 1.2, "min_p": 0.05, "seed": 5, "logprobs": 0},
    {"prompt_logprobs": 1, "min_tokens": 4, "stop_token_ids": [3], "ignore_eos": False},
    {"allowed_token_ids": list(range(40, 60)), "frequency_penalty": 0.2},
]  # fmt: skip


class Close(float):
    """A log-probability. A step of another size adds in another order."""

    def __eq__(self, other: object) -> bool:
        return abs(self - other) < 2e-3

    __hash__ = None


def told(folder, messages: list[Submit], **settings):
    """What each request was given: tokens, log-probabilities, how it ended; and the records."""
    engine, published = make_engine(folder, **settings)
    hand_over(engine, messages)
    drain(engine, check=True)
    ends = {name: ended.reason for name, ended in published.ended.items()}
    scores = {
        name: [score and (score.token_id, score.rank, Close(score.logprob)) for score in each]
        for name, each in published.logprobs.items()
    }
    return (published.tokens, scores, published.prompt_logprobs.keys(), ends), published.records


def requests_with_controls() -> list[Submit]:
    messages = []
    for index, wishes in enumerate(CONTROLS):
        prompt = ([5 + index, 30, 31, 32, 33 + index % 3] * 5)[: 9 + 3 * index]
        messages.append(submit(f"r{index}", prompt, 30, **wishes))
    return messages


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("proposer", PROPOSERS)
def test_every_control_gives_the_same_tokens_with_drafts(proposer, overlap):
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "overlap": overlap}
    plain, _ = told("tiny-model", requests_with_controls(), **limits)
    drafted, records = told(
        "tiny-model", requests_with_controls(), speculation=proposer, speculation_adaptive="off", **limits
    )
    assert drafted == plain
    assert sum(record.accepted_tokens for record in records) > 10


@pytest.mark.parametrize("proposer", PROPOSERS)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_prefill_chunk_tokens": 7, "block_size": 5},
        {"num_kv_blocks": 10, "max_model_len": 150, "prefix_caching": False},
        *further(
            {"attention_backend": "torch", "fused_operations": "off", "policy": "prefill-first", "overlap": "on"},
            {"num_kv_blocks": 40, "block_size": 5, "max_model_len": 150, "max_num_batched_tokens": 33},
        ),
    ],
    ids=lambda limits: " ".join(limits) or "default",
)
def test_speculation_changes_no_token_of_the_real_engine_and_loses_no_nanosecond(proposer, limits, checkpoints):
    """Greedy and seeded requests, forks and prefix hits; `tokens_of` holds ledgers and blocks to their sums."""
    folder = checkpoints["llama"]
    plain, _ = tokens_of(folder, real_traffic(), together=4, **limits)
    drafted, preemptions = tokens_of(
        folder, real_traffic(), together=4, speculation=proposer, speculation_adaptive="off", speculation_tokens=5,
        **limits,
    )  # fmt: skip
    assert drafted == plain
    assert preemptions > 0 or limits.get("num_kv_blocks") != 10


@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**31),
    limits=st.fixed_dictionaries({
        "speculation": st.sampled_from(PROPOSERS),
        "speculation_tokens": st.integers(1, 16),
        "speculation_adaptive": st.sampled_from(["on", "off"]),
        "block_size": st.sampled_from([1, 4, 16]),
        "max_num_batched_tokens": st.sampled_from([8, 33, 512]),
        "max_num_seqs": st.sampled_from([2, 8]),
        "prefix_caching": st.booleans(),
        "overlap": st.sampled_from(["on", "off"]),
        "num_kv_blocks": st.sampled_from([1024, 130]),
    }),
)  # fmt: skip
def test_no_setting_of_speculation_changes_what_any_control_gives(seed, limits, checkpoints):
    """On a checkpoint with random weights, whose greedy texts run in circles."""
    dice = random.Random(seed)
    controls = [wishes for wishes in CONTROLS if "grammar" not in wishes]
    messages = []
    for index in range(dice.randint(1, 6)):
        prompt = [dice.randrange(3, 320) for _ in range(dice.randint(1, 12))] * dice.randint(1, 3)
        messages.append(submit(f"r{index}", prompt, dice.randint(1, 40), **dice.choice(controls)))
    limits = limits | {"max_model_len": 100}
    if limits["block_size"] != 1 and limits["num_kv_blocks"] == 130:
        limits["num_kv_blocks"] = -(-100 // limits["block_size"]) + 2  # too few for all
    plain, _ = told(checkpoints["llama"], messages, **(limits | {"speculation": "none"}))
    assert told(checkpoints["llama"], messages, **limits)[0] == plain


@pytest.mark.thorough
def test_a_token_behind_an_accepted_draft_has_the_distribution_of_the_model(checkpoints):
    """Chi-square (99.99 %) over many seeds, of rows that a draft stands before, against the model's own softmax."""
    engine, published = make_engine(
        checkpoints["llama"], num_kv_blocks=4096, max_num_seqs=64, speculation="early-exit", speculation_adaptive="off"
    )
    sampling = {"temperature": 1.0, "logprobs": 300}
    hand_over(engine, [submit(f"r{seed}", [7, 8, 9], 8, seed=seed, **sampling) for seed in range(600)])
    drain(engine)
    histories: dict[tuple[int, ...], list[tuple[int, dict[int, float]]]] = {}
    for name, tokens in published.tokens.items():
        for place, score in enumerate(published.logprobs[name]):
            probabilities = {token: math.exp(logprob) for token, logprob in score.top}
            histories.setdefault(tuple(tokens[:place]), []).append((tokens[place], probabilities))
    assert sum(record.accepted_tokens for record in published.records) > 50
    tested = 0
    for drawn in histories.values():
        probabilities = drawn[0][1]
        likely = [token for token, share in probabilities.items() if share * len(drawn) >= 5][:9]
        if len(drawn) < 60 or not likely:
            continue
        counts = Counter(token for token, _ in drawn)
        pairs = [(counts[token], probabilities[token] * len(drawn)) for token in likely]
        others = len(drawn) - sum(expected for _, expected in pairs)
        if others >= 5:
            pairs.append((len(drawn) - sum(count for count, _ in pairs), others))
        statistic = sum((count - expected) ** 2 / expected for count, expected in pairs)
        assert statistic < CHI_SQUARE[len(pairs) - (others >= 5)]
        tested += 1
    assert tested >= 2


@pytest.mark.server
@pytest.mark.slow
def test_a_server_that_speculates_closes_its_books_and_says_the_same(tmp_path):
    """Streams, stop strings and several choices, over HTTP: usage, ledgers and steps of tokens that come together."""
    body = {"model": "tiny-model", "prompt": "def add(a, b):\n    return a + b\n\ndef add(a, b):\n", "temperature": 0}
    bodies = [body | {"max_tokens": 40}, body | {"max_tokens": 30, "stop": ["return"]},
              body | {"max_tokens": 20, "n": 2, "temperature": 0.7, "seed": 3}]  # fmt: skip
    texts = []
    for name, options in (("plain", ()), ("drafted", ("--speculation", "ngram", "--speculation-adaptive", "off"))):
        run = tmp_path / name
        with serving(tmp_path, "tiny-model", "--run-dir", str(run), *options) as server:
            answers = [
                httpx.post(f"{server.url}/v1/completions", json=each, headers={"x-request-id": f"r{i}"}, timeout=60)
                for i, each in enumerate(bodies)
            ]
            texts.append([([c["text"] for c in a.json()["choices"]], a.json()["usage"]) for a in answers])
            rows = rows_of(run, ["r0", "r1", "r2"])
        assert not [fault for row in rows for fault in open_books(row)]
        assert not open_steps(table(run, "steps"))
        assert (rows[0]["accepted_tokens"] > 0) == bool(options)
        assert (rows[0]["ledger_compute_draft_ns"] > 0) == bool(options)
    assert texts[0] == texts[1]
