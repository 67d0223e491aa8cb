"""Greedy tokens equal those of Hugging Face transformers, and no setting of the engine changes them."""

import random

import pytest

from tests.engine.harness import drain, generate, hand_over, make_engine, submit

FAMILIES = ("llama", "llama3", "qwen3")
LENGTHS = (1, 15, 16, 17, 48, 150)  # around the block size, and more than a chunk


def prompts(seed: int = 0, lengths=LENGTHS) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, 320) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def expected(oracle):
    """Family → transformers' tokens for `prompts()`."""
    return {family: [oracle(family, prompt, 12) for prompt in prompts()] for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_alone(family, checkpoints, expected):
    for prompt, tokens in zip(prompts(), expected[family], strict=True):
        assert generate(checkpoints[family], [prompt])[0] == [tokens]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_equal_transformers_in_a_batch(family, checkpoints, expected):
    assert generate(checkpoints[family], prompts())[0] == expected[family]


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_caching": False},
        {"max_prefill_chunk_tokens": 7},
        {"max_num_batched_tokens": 20},
        {"max_num_batched_tokens": 1},
        {"block_size": 1, "num_kv_blocks": 2048},
        {"block_size": 5},
        {"block_size": 64},
        {"max_num_seqs": 2},
        {"num_kv_blocks": 12, "max_model_len": 180},
        {"num_kv_blocks": 12, "max_model_len": 180, "prefix_caching": False, "max_num_batched_tokens": 33},
    ],
    ids=str,
)
def test_no_setting_changes_greedy_tokens(settings, checkpoints, expected):
    assert generate(checkpoints["qwen3"], prompts(), **settings)[0] == expected["qwen3"]


def test_preempted_requests_give_the_same_tokens(checkpoints, oracle):
    batch = prompts(3, (40, 40, 40, 40))
    tokens, published = generate(checkpoints["llama"], batch, 60, num_kv_blocks=16, max_model_len=256)
    assert sum(ended.preemptions for ended in published.ended.values()) > 0
    assert sum(ended.recomputed_tokens for ended in published.ended.values()) > 0
    assert tokens == [oracle("llama", prompt, 60) for prompt in batch]


def test_order_of_arrival_changes_no_tokens(checkpoints, expected):
    backwards = generate(checkpoints["qwen3"], prompts()[::-1])[0]
    assert backwards[::-1] == expected["qwen3"]


def test_cached_prompt_gives_the_same_tokens_and_is_not_computed_again(checkpoints, expected):
    engine, published = make_engine(checkpoints["qwen3"])
    for turn in ("cold", "warm"):
        hand_over(engine, [submit(f"{turn}{i}", prompt) for i, prompt in enumerate(prompts())])
        drain(engine, check=True)
        assert [published.tokens[f"{turn}{i}"] for i in range(len(LENGTHS))] == expected["qwen3"]
    for i, length in enumerate(LENGTHS):
        assert published.ended[f"cold{i}"].cached_tokens == 0
        # All full blocks but the one with the last token, which is computed for its logits.
        assert published.ended[f"warm{i}"].cached_tokens == (length - 1) // 16 * 16
        assert published.ended[f"warm{i}"].computed_tokens == length - (length - 1) // 16 * 16 + 11


def test_generated_tokens_are_reused_by_the_next_turn(checkpoints, oracle):
    engine, published = make_engine(checkpoints["llama"])
    first = prompts(5, (30,))[0]
    hand_over(engine, [submit("one", first, 20)])
    drain(engine)
    second = first + published.tokens["one"] + prompts(6, (9,))[0]
    hand_over(engine, [submit("two", second, 12)])
    drain(engine)
    assert published.ended["two"].cached_tokens == 48  # 30 + 20, of which the last was never computed: 3 full blocks
    assert published.tokens["two"] == oracle("llama", second, 12)


def test_bfloat16_runs_and_starts_like_float32(checkpoints, expected):
    tokens, _ = generate(checkpoints["qwen3"], prompts(), dtype="bfloat16")
    agreed = sum(ours[0] == theirs[0] for ours, theirs in zip(tokens, expected["qwen3"], strict=True))
    assert agreed >= len(LENGTHS) - 2  # eight bits of mantissa: near ties may fall the other way
