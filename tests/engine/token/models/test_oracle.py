"""Greedy tokens and log-probabilities equal those of Hugging Face transformers, and no setting changes them."""

import random
from functools import cache

import pytest

from tests.engine.families import FAMILIES, random_model
from tests.engine.harness import drain, generate, hand_over, make_engine, submit
from tests.further import further

LENGTHS = (1, 15, 16, 17, 48, 150)  # around the block size, and more than a chunk
FEW = ("llama", "deepseek-v3")  # for `make check`: dense, and a mixture with latent attention
GENERATED = ["qwen3", *further("llama", "llama3")]  # whose tokens transformers itself generates, one after another
EVERY_FAMILY = [*FEW, *further(*(family for family in FAMILIES if family not in FEW))]
TOLERANCE = 2e-4  # of a log-probability: float32 sums in another order; 4e-5 was the worst seen over all families


def prompts(seed: int = 0, lengths=LENGTHS) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(3, 320) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def expected(oracle):
    """Family → transformers' tokens for `prompts()`."""
    return cache(lambda family: [oracle(family, prompt, 12) for prompt in prompts()])


@pytest.fixture(scope="module")
def reference():
    """(folder, sequences, dtype) → transformers' log-probabilities after each position, in one padded batch."""
    import torch
    from transformers import AutoModelForCausalLM

    last = {}  # the tests of a family follow each other

    def of(folder, sequences: list[list[int]], dtype=torch.float32) -> torch.Tensor:
        """[sequences, longest, vocab_size] float64; what stands behind a sequence changes nothing before it."""
        if (folder, dtype) not in last:
            last.clear()
            last[folder, dtype] = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        width = max(map(len, sequences))
        ids = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences])
        with torch.inference_mode():
            return last[folder, dtype](ids).logits.double().log_softmax(-1)

    return of


def run(
    folder,
    batch: list[list[int]],
    max_tokens: int = 12,
    *,
    engine=None,
    turn: str = "r",
    scored: bool = True,
    **settings,
):
    """Greedy tokens with log-probabilities, of the prompts too where `scored`."""
    engine, published = engine or make_engine(folder, **settings)
    told = {"logprobs": 0, "prompt_logprobs": 0 if scored else None}
    hand_over(engine, [submit(f"{turn}{i}", prompt, max_tokens, **told) for i, prompt in enumerate(batch)])
    drain(engine, check=True)
    return engine, published


def sequences(published, batch, turn: str = "r") -> list[list[int]]:
    return [prompt + published.tokens[f"{turn}{i}"] for i, prompt in enumerate(batch)]


def assert_agrees(published, batch, logprobs, turn: str = "r") -> None:
    """Every token is the most probable one after those before it, and every log-probability is transformers'."""
    for i, prompt in enumerate(batch):
        drawn = published.logprobs[f"{turn}{i}"]
        scored = published.prompt_logprobs.get(f"{turn}{i}", [])
        for position, told in [*enumerate(scored), *enumerate(drawn, start=len(prompt) - 1)]:
            exact = logprobs[i, position]
            assert told.logprob == pytest.approx(exact[told.token_id].item(), abs=TOLERANCE), (i, position)
            if position >= len(prompt) - 1:
                # Two tokens within rounding of each other are equally right; the next position goes on from ours.
                assert exact[told.token_id] >= exact.max() - 2 * TOLERANCE, (i, position)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_tokens_and_logprobs_equal_transformers_in_mixed_batches_cold_and_cached(family, checkpoints, reference):
    batch = prompts(1, (1, 15, 16, 17, 48, 330))
    built = run(checkpoints[family], batch, turn="cold", max_num_batched_tokens=96)
    run(None, batch, turn="warm", engine=built, scored=False)
    published = built[1]
    assert_agrees(published, batch, reference(checkpoints[family], sequences(published, batch, "cold")), "cold")
    assert_agrees(published, batch, reference(checkpoints[family], sequences(published, batch, "warm")), "warm")
    assert [published.ended[f"warm{i}"].cached_tokens for i in range(len(batch))] == [0, 0, 0, 16, 32, 320]


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_preempted_requests_equal_transformers(family, checkpoints, reference):
    batch = prompts(3, (40, 40, 40, 40))
    _, published = run(checkpoints[family], batch, 40, num_kv_blocks=16, max_model_len=256)
    recomputed = sum(ended.recomputed_tokens for ended in published.ended.values())
    assert recomputed > 0 or family in ("mistral", "mixtral"), "blocks behind their windows go back: all requests fit"
    assert_agrees(published, batch, reference(checkpoints[family], sequences(published, batch)))


@pytest.mark.parametrize("family", ["mistral", *further("deepseek-v3", "mpt-six-heads", "qwen3-moe")])
@pytest.mark.parametrize("settings", [{"block_size": 5, "max_prefill_chunk_tokens": 7}, {"max_num_batched_tokens": 3}])
def test_blocks_and_chunks_of_any_size_equal_transformers(family, settings, checkpoints, reference):
    batch = prompts(4, (9, 64))
    _, published = run(checkpoints[family], batch, 8, **settings)
    assert_agrees(published, batch, reference(checkpoints[family], sequences(published, batch)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_checkpoint_in_half_precision_is_read_exactly(dtype, tmp_path, reference):
    import torch

    random_model("qwen2").to(getattr(torch, dtype)).save_pretrained(tmp_path)
    batch = prompts(5, (20, 70))
    _, published = run(tmp_path, batch)
    assert_agrees(published, batch, reference(tmp_path, sequences(published, batch)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", ["mixtral", *further("llama3", "gemma", "deepseek-v3", "mpt")])
def test_half_precision_loses_no_more_than_transformers_does(family, dtype, checkpoints, reference):
    import torch

    batch, folder = prompts(6, (150, 40)), checkpoints[family]
    _, published = run(folder, batch, 1, dtype=dtype)
    exact, theirs = reference(folder, batch), reference(folder, batch, getattr(torch, dtype))
    ours, rounded = [], []
    for i, prompt in enumerate(batch):
        for position, told in enumerate(published.prompt_logprobs[f"r{i}"]):
            true = exact[i, position, prompt[position + 1]]
            ours.append(abs(told.logprob - true))
            rounded.append(abs(theirs[i, position, prompt[position + 1]] - true))
    ours, rounded = torch.stack(ours).median(), torch.stack(rounded).median()
    assert 0 < ours < 1.5 * rounded  # medians: a token that rounding sends to another expert is far off in either


@pytest.mark.parametrize("family", GENERATED)
def test_greedy_tokens_equal_transformers_alone(family, checkpoints, expected):
    for prompt, tokens in zip(prompts(), expected(family), strict=True):
        assert generate(checkpoints[family], [prompt])[0] == [tokens]


@pytest.mark.parametrize("family", GENERATED)
def test_greedy_tokens_equal_transformers_in_a_batch(family, checkpoints, expected):
    assert generate(checkpoints[family], prompts())[0] == expected(family)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 20},
        {"num_kv_blocks": 12, "max_model_len": 180, "prefix_caching": False, "max_num_batched_tokens": 33},
        *further(
            {"prefix_caching": False},
            {"max_prefill_chunk_tokens": 7},
            {"max_num_batched_tokens": 1},
            {"block_size": 1, "num_kv_blocks": 2048},
            {"block_size": 5},
            {"block_size": 64},
            {"max_num_seqs": 2},
            {"num_kv_blocks": 12, "max_model_len": 180},
        ),
    ],
    ids=str,
)
def test_no_setting_changes_greedy_tokens(settings, checkpoints, expected):
    assert generate(checkpoints["qwen3"], prompts(), **settings)[0] == expected("qwen3")


def test_order_of_arrival_changes_no_tokens(checkpoints, expected):
    backwards = generate(checkpoints["qwen3"], prompts()[::-1])[0]
    assert backwards[::-1] == expected("qwen3")


def test_cached_prompt_gives_the_same_tokens_and_is_not_computed_again(checkpoints, expected):
    engine, published = make_engine(checkpoints["qwen3"])
    for turn in ("cold", "warm"):
        hand_over(engine, [submit(f"{turn}{i}", prompt) for i, prompt in enumerate(prompts())])
        drain(engine, check=True)
        assert [published.tokens[f"{turn}{i}"] for i in range(len(LENGTHS))] == expected("qwen3")
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
