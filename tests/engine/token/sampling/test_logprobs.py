"""Log-probabilities are those of the model itself, whatever the controls, the chunks, the batch and the preemptions."""

import random

import pytest
import torch

from sojourn.engine.token.sampling import logprobs
from tests.engine.harness import drain, hand_over, make_engine, submit

TOLERANCE = 2e-4  # float32 sums in another order; the tiny models' log-probabilities are around -6


@pytest.fixture(scope="module")
def exact(checkpoints):
    """(family, ids) → transformers' log-probabilities after each position, [len(ids), vocab_size] float64."""
    from transformers import AutoModelForCausalLM

    models = {}

    def of(family: str, ids: list[int]) -> torch.Tensor:
        if family not in models:
            models[family] = AutoModelForCausalLM.from_pretrained(checkpoints[family], dtype=torch.float32)
        with torch.inference_mode():
            return models[family](torch.tensor([ids])).logits[0].double().log_softmax(-1)

    return of


def random_prompts(lengths, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, 320) for _ in range(length)] for length in lengths]


def run(folder, requests, **settings):
    engine, published = make_engine(folder, **settings)
    hand_over(engine, requests)
    drain(engine)
    return published


def assert_agrees(told, token_id: int, truth: torch.Tensor, top: int) -> None:
    assert told.token_id == token_id
    assert told.logprob == pytest.approx(truth[token_id].item(), abs=TOLERANCE)
    assert truth.sort(descending=True).values[told.rank - 1].item() == pytest.approx(told.logprob, abs=TOLERANCE)
    assert [value for _, value in told.top] == pytest.approx(truth.topk(top).values.tolist(), abs=TOLERANCE)
    assert [value for _, value in told.top] == pytest.approx([truth[i].item() for i, _ in told.top], abs=TOLERANCE)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logprobs_equal_transformers_in_a_batch_of_chunks(family, checkpoints, exact):
    prompts = random_prompts((1, 2, 16, 17, 90))
    wants = [(0, 5), (3, 0), (5, 1), (None, 4), (2, None)]
    requests = [
        submit(f"r{i}", prompt, 6, logprobs=drawn, prompt_logprobs=scored, temperature=0.9, seed=i, top_p=0.8)
        for i, (prompt, (drawn, scored)) in enumerate(zip(prompts, wants, strict=True))
    ]
    published = run(checkpoints[family], requests, max_num_batched_tokens=20)
    for i, (prompt, (drawn, scored)) in enumerate(zip(prompts, wants, strict=True)):
        name, ids = f"r{i}", prompt + published.tokens[f"r{i}"]
        truth = exact(family, ids)
        if drawn is None:
            assert published.logprobs[name] == [None] * 6
        else:
            for step, told in enumerate(published.logprobs[name]):
                assert_agrees(told, ids[len(prompt) + step], truth[len(prompt) + step - 1], drawn)
        assert (scored is None) == (name not in published.prompt_logprobs)
        if scored is not None:
            assert len(published.prompt_logprobs[name]) == len(prompt) - 1
            for position, told in enumerate(published.prompt_logprobs[name]):
                assert_agrees(told, prompt[position + 1], truth[position], scored)


def test_controls_change_what_is_drawn_but_not_what_is_told(checkpoints, exact):
    prompt = random_prompts((30,))[0]
    edits = {"temperature": 1.7, "top_k": 4, "repetition_penalty": 1.5, "logit_bias": {7: 9.0}, "presence_penalty": 1.0}
    published = run(checkpoints["llama"], [submit("a", prompt, 20, logprobs=2, **edits)])
    ids = prompt + published.tokens["a"]
    truth = exact("llama", ids)
    for step, told in enumerate(published.logprobs["a"]):
        assert_agrees(told, ids[30 + step], truth[29 + step], 2)
    assert any(told.token_id != told.top[0][0] for told in published.logprobs["a"])


def test_a_scored_prompt_is_told_whole_though_its_beginning_is_cached(checkpoints, exact):
    prompt = random_prompts((70,))[0]
    engine, published = make_engine(checkpoints["qwen3"])
    for name in ("first", "second"):
        hand_over(engine, [submit(name, prompt, 2, prompt_logprobs=1)])
        drain(engine)
    assert published.prompt_logprobs["second"] == published.prompt_logprobs["first"]
    assert len(published.prompt_logprobs["second"]) == 69
    assert published.ended["second"].cached_tokens == 0


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_tells_no_prompt_token_twice(prefix_caching, checkpoints):
    prompts = random_prompts((40, 40, 40, 40), seed=3)
    requests = [submit(f"r{i}", p, 60, prompt_logprobs=2, logprobs=1, seed=i) for i, p in enumerate(prompts)]
    engine, squeezed = make_engine(
        checkpoints["llama"], num_kv_blocks=16, max_model_len=256, max_prefill_chunk_tokens=9,
        prefix_caching=prefix_caching,
    )  # fmt: skip
    hand_over(engine, requests)
    booked = list(engine.scheduler.requests.values())
    drain(engine)
    assert sum(ended.preemptions for ended in squeezed.ended.values()) > 0
    assert [len(request.prompt_logprobs) for request in booked] == [39] * 4
    calm = run(checkpoints["llama"], requests)
    assert squeezed.tokens == calm.tokens
    for name in calm.tokens:
        pairs = zip(
            squeezed.prompt_logprobs[name] + squeezed.logprobs[name],
            calm.prompt_logprobs[name] + calm.logprobs[name],
            strict=True,
        )
        for mine, other in pairs:
            assert (mine.token_id, mine.rank) == (other.token_id, other.rank)
            assert mine.logprob == pytest.approx(other.logprob, abs=TOLERANCE)


def test_scoring_in_pieces_changes_nothing(checkpoints, monkeypatch):
    requests = [submit("a", random_prompts((100,))[0], 2, prompt_logprobs=3)]
    whole = run(checkpoints["llama"], requests)
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", 7 * 320)
    parts = run(checkpoints["llama"], requests)
    for mine, other in zip(parts.prompt_logprobs["a"], whole.prompt_logprobs["a"], strict=True):
        assert mine.token_id == other.token_id and mine.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
