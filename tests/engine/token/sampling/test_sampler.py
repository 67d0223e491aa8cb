"""Draws follow the exact distribution, and a seed gives the same tokens whatever surrounds it."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sojourn.engine.sampling import SamplingParams
from sojourn.engine.token.sampling.sampler import NOTHING, Sampler, uniform
from sojourn.engine.token.sampling.state import LzHistory
from tests.engine.exact_sampling import Row, assert_sampled_from, distribution, penalised
from tests.engine.harness import drain, generate, hand_over, make_engine, submit
from tests.further import further

LOGITS = [2.0, 1.0, 0.5, 0.0, -1.0, -0.6, -3.0, 1.5, 1.2, -0.4]
PROMPT, OUTPUT = [5, 8, 5], [0, 1, 7, 0, 9, 2, 0, 1]  # with positive and negative logits in both


def sampled_ids(rows: list[Row], logits: torch.Tensor) -> list[int]:
    sampler = Sampler(logits.shape[-1], torch.device("cpu"))
    return sampler.sample(logits, sampler.prepare(rows)).tolist()


def counted(draws: int, prompt=PROMPT, output=OUTPUT, **controls) -> list[int]:
    rows = [
        Row(str(seed), SamplingParams(max_tokens=99, seed=seed, **controls), prompt + output, len(prompt))
        for seed in range(draws)
    ]
    ids = sampled_ids(rows, torch.tensor(LOGITS).repeat(draws, 1))
    return torch.bincount(torch.tensor(ids), minlength=len(LOGITS)).tolist()


CONTROLS = [
    {"temperature": 1.0},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_p": 0.7},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.6},
    {"min_p": 0.2},
    {"min_p": 0.2, "temperature": 3.0},
    {"top_n_sigma": 1.0},
    {"top_n_sigma": 0.7, "temperature": 5.0},
    {"top_n_sigma": 1.5, "min_p": 0.1, "top_k": 4, "top_p": 0.8, "temperature": 1.7},
    {"min_p": 0.25, "top_p": 0.75, "temperature": 1.4},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -0.3},
    {"presence_penalty": 1.1},
    {"lz_penalty": 0.6},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": -0.5, "lz_penalty": 0.3},
    {"logit_bias": {6: 4.0, 0: -2.5}},
    {"logit_bias": {6: 100.0}, "top_p": 0.9},
    {"allowed_token_ids": [1, 4, 6, 9]},
    {"bad_words": [[2], [1, 7], [0, 1, 0], [7, 3], [0, 9, 1]]},
    {"min_tokens": 9, "stop_token_ids": [0, 2]},
    {"min_tokens": 8, "stop_token_ids": [0, 2]},
    {"repetition_penalty": 1.5, "allowed_token_ids": [0, 1, 2, 3, 8], "bad_words": [[1, 3]], "top_k": 3, "min_p": 0.01},
    {"temperature": 1.3, "presence_penalty": 2.0, "logit_bias": {4: 3.0}, "top_n_sigma": 1.2, "top_p": 0.9},
]


@pytest.mark.parametrize("controls", [*further(*CONTROLS[:-2]), *CONTROLS[-2:]], ids=str)
def test_draws_follow_the_exact_distribution(controls):
    expected = distribution(LOGITS, SamplingParams(max_tokens=99, **controls), PROMPT, OUTPUT)
    assert_sampled_from(counted(3000, **controls), expected)


@pytest.mark.parametrize("controls", [c for c in CONTROLS if "temperature" not in c], ids=str)
def test_greedy_draws_are_the_best_token_after_penalties_and_masks(controls):
    expected = distribution(LOGITS, SamplingParams(max_tokens=99, temperature=0.0, **controls), PROMPT, OUTPUT)
    assert counted(1, temperature=0.0, **controls) == expected


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(99),
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 1, 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
    top_n_sigma=st.sampled_from([0.0, 0.0, 0.3, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.8]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -1.0, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5]),
    lz_penalty=st.sampled_from([0.0, 0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {}, {3: 5.0, 1: -100.0}]),
    bad_words=st.sampled_from([[], [], [[1], [2, 3]], [[1, 1, 2]]]),
    allowed_token_ids=st.sampled_from([[], [], [0, 2, 5], [1]]),
    min_tokens=st.sampled_from([0, 0, 4]),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.just([2, 4]),
)
TOKENS = st.lists(st.integers(0, 9), max_size=8)
ROWS = st.lists(st.tuples(PARAMS, st.lists(st.integers(0, 9), min_size=1, max_size=5), TOKENS), min_size=1, max_size=6)


@settings(max_examples=80)
@given(ROWS, st.integers(0, 1000))
def test_a_batch_draws_what_each_row_draws_alone_and_nothing_impossible(rows, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 10, generator=generator) * 3
    before = logits.clone()
    batch = [Row(str(i), params, prompt + output, len(prompt)) for i, (params, prompt, output) in enumerate(rows)]
    together = sampled_ids(batch, logits)
    assert together == [sampled_ids([row], logits[i : i + 1])[0] for i, row in enumerate(batch)]
    assert torch.equal(logits, before), "log-probabilities are told of the model's own logits"
    for i, (params, prompt, output) in enumerate(rows):
        probabilities = distribution(logits[i].tolist(), params, prompt, output)
        if together[i] == NOTHING:
            assert not any(probabilities)
        else:
            assert probabilities[together[i]] > 0


@settings(max_examples=40)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=30), st.lists(st.booleans(), min_size=30, max_size=30),
    st.integers(0, 1000),
)  # fmt: skip
def test_history_that_follows_the_draws_equals_history_made_anew(forced, preempted, seed):
    """Whatever was drawn, with a preemption anywhere, next to a neighbour that comes and goes."""
    controls = dict(
        temperature=0.0, repetition_penalty=1.4, frequency_penalty=0.6, presence_penalty=0.3, lz_penalty=0.4,
        bad_words=[[1, 2]],
    )  # fmt: skip
    params = SamplingParams(max_tokens=99, **controls)
    kept = Sampler(6, torch.device("cpu"))
    row = Row("a", params, [2, 3], 2)
    generator = torch.Generator().manual_seed(seed)
    for step in range(len(forced)):
        logits = torch.randn(2, 6, generator=generator) * 2
        neighbour = Row(f"b{step // 3}", params, [1, 5], 2)
        batch = [neighbour, row] if step % 3 else [row]
        token = kept.sample(logits[-len(batch) :], kept.prepare(batch)).tolist()[-1]
        if step % 3 == 2:
            kept.forget(neighbour.id)
        assert token == sampled_ids([Row("a", params, list(row.token_ids), 2)], logits[-1:])[0]
        row.token_ids.append(token)
        if preempted[step]:
            kept.forget("a")
    kept.forget("a")
    kept.forget(f"b{(len(forced) - 1) // 3}")
    assert kept.history.used == 0


def test_a_step_that_is_prepared_before_another_is_sampled_leaves_it_the_histories_of_its_drafts():
    """As in a pipeline, where two batches are under way."""
    params = SamplingParams(max_tokens=99, temperature=0.0, frequency_penalty=2.0)
    kept, alone = (Sampler(6, torch.device("cpu")) for _ in range(2))
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 2.5, 1.5]]).repeat(3, 1)

    def prepared(sampler: Sampler, name: str, drafts: list[int]):
        row = Row(name, params, [2, 3, 1], 2)
        return sampler.prepare([row] * 3, [3, 4, 5], [tuple(drafts[:count]) for count in range(3)])

    expected = [alone.sample(logits, prepared(alone, name, drafts)).tolist()
                for name, drafts in (("a", [3, 4]), ("b", [1, 2]))]  # fmt: skip
    steps = [prepared(kept, "a", [3, 4]), prepared(kept, "b", [1, 2])]
    assert [kept.sample(logits, step).tolist() for step in steps] == expected
    assert expected[0] == [3, 4, 2] and kept.history.used == 2


class Written(TorchDispatchMode):
    """Counts the elements that operations write into tensors of their own."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        out = operation(*args, **(kwargs or {}))
        self.elements += out.numel() if isinstance(out, torch.Tensor) else 0
        return out


@pytest.mark.parametrize("controls", [{"frequency_penalty": 1.0}, {"logit_bias": {5: 1.0}}, {"bad_words": [[5, 3]]}])
def test_a_row_with_controls_copies_no_logits_of_its_neighbours(controls):
    written = {}
    for num_rows in (8, 64):
        rows = [Row(str(i), SamplingParams(max_tokens=9, temperature=0.0), [3, 5], 2) for i in range(num_rows)]
        rows[0].sampling = SamplingParams(max_tokens=9, **controls)
        sampler, logits = Sampler(1000, torch.device("cpu")), torch.zeros(num_rows, 1000)
        inputs = sampler.prepare(rows)
        with Written() as count:
            sampler.sample(logits, inputs)
        written[num_rows] = count.elements
    assert written[64] - written[8] < 1000, "some numbers for each row, but not its logits"


def test_a_bad_word_may_begin_in_the_prompt_and_go_on_in_the_output():
    """As in vLLM: what the prompt says is no fault of the output."""
    logits = torch.tensor([0.0, 3.0, 2.0, 1.0]).repeat(3, 1)
    params = SamplingParams(max_tokens=9, temperature=0.0, bad_words=[[3, 0, 1], [3, 1]])
    rows = [Row("all", params, [3], 1), Row("half", params, [3, 0], 1), Row("none", params, [0, 3, 0], 1)]
    assert sampled_ids(rows, logits) == [1, 1, 2]


def test_lz_savings_are_those_of_the_longest_nearest_copy_over_long_outputs():
    dice = random.Random(5)
    for alphabet, length in ((2, 40), (3, 600), (30, 1040), (30, 1500), (4, 2)):
        output = [dice.randrange(alphabet) for _ in range(length)]
        output[length // 2 :] = output[: length - length // 2]  # a long repetition
        history = LzHistory(1000, output[: length // 3])
        for token in output[length // 3 :]:
            history.follow([token])
        tokens, bits = history.savings()
        expected = penalised([0.0] * 1000, SamplingParams(max_tokens=1, lz_penalty=1.0), [], output)
        assert dict(zip(tokens.tolist(), bits.tolist(), strict=True)) == pytest.approx(
            {token: -value for token, value in enumerate(expected) if value}
        )


def test_masks_that_leave_nothing_end_the_request_with_an_error_and_no_other(checkpoints):
    engine, published = make_engine(checkpoints["qwen3"])
    prompt = [5, 6, 7]
    hand_over(
        engine,
        [
            submit("neighbour", prompt, 8, temperature=1.0, seed=3),
            submit("empty", prompt, 8, temperature=1.0, allowed_token_ids=[4], bad_words=[[4]], logprobs=2),
            submit("later", prompt, 8, allowed_token_ids=[4, 9], bad_words=[[9], [4, 4]], repetition_penalty=1.1),
        ],
    )
    drain(engine, check=True)
    alone = generate(checkpoints["qwen3"], [prompt], 8, {"temperature": 1.0, "seed": 3})[0]
    assert published.tokens == {"neighbour": alone[0], "later": [4]}
    for name in ("empty", "later"):
        assert published.ended[name].reason == "error"
        assert "leave no token" in published.ended[name].error
    assert engine.runner.sampler.history.used == engine.runner.sampler.biases.used == 0


def test_min_tokens_keeps_stop_tokens_out_until_then(checkpoints):
    stops = list(range(3, 320, 2))  # half of all tokens, so that a draw would soon hit one
    for wanted in (0, 1, 7):
        engine, published = make_engine(checkpoints["llama"])
        hand_over(
            engine,
            [submit("a", [9, 8], 60, temperature=1.5, ignore_eos=False, stop_token_ids=stops, min_tokens=wanted)],
        )
        drain(engine)
        tokens = published.tokens["a"]
        assert published.ended["a"].reason == "stop" and tokens[-1] in stops
        assert not set(tokens[: max(wanted, len(tokens) - 1)]) & set(stops) and len(tokens) > wanted


def test_each_position_of_a_sequence_is_drawn_with_its_own_number(checkpoints):
    engine, _ = make_engine(checkpoints["qwen3"])
    hand_over(engine, [submit("a", [5, 6, 7], 3, temperature=1.0, seed=1)])
    seen = []
    prepare = engine.runner.prepare
    engine.runner.prepare = lambda items: seen.append(batch := prepare(items)) or batch
    drain(engine)
    assert [batch.sampling.direct.uniform.item() for batch in seen] == [uniform(1, position) for position in (3, 4, 5)]


def test_uniform_numbers_fill_the_interval_and_never_reach_one():
    numbers = [uniform(seed, position) for seed in (0, 1, -5, 2**63 - 1) for position in range(500)]
    assert min(numbers) >= 0 and max(numbers) < 1 and len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.03  # four standard errors


SEEDED = [
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {
        "temperature": 1.2, "min_p": 0.02, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "lz_penalty": 0.3,
        "logit_bias": {9: 2.0}, "bad_words": [[5, 6], [11]],
    },
]  # fmt: skip


@pytest.mark.parametrize("controls", SEEDED, ids=["truncated", "edited"])
def test_a_seed_gives_the_same_tokens_alone_batched_preempted_and_restarted(controls, checkpoints):
    dice = random.Random(1)
    batch = [[dice.randrange(3, 320) for _ in range(40)] for _ in range(4)]
    folder = checkpoints["qwen3"]

    def run(prompts: list[list[int]], **limits):
        engine, published = make_engine(folder, **limits)  # each is a restart
        hand_over(engine, [submit(f"r{i}", p, 50, seed=i, **controls) for i, p in enumerate(prompts)])
        drain(engine)
        assert engine.runner.sampler.history.used == engine.runner.sampler.biases.used == 0
        return [published.tokens[f"r{i}"] for i in range(len(prompts))], published

    together, _ = run(batch)
    squeezed, published = run(batch, num_kv_blocks=16, max_model_len=256)
    assert sum(ended.preemptions for ended in published.ended.values()) > 0
    assert squeezed == together
    assert run(batch[:1])[0][0] == together[0]
    assert together[0] != generate(folder, batch[:1], 50, {"seed": 99, **controls})[0][0]
