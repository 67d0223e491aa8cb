"""Keys and values in 8 bits: what it costs in accuracy, and that nothing else about the engine changes."""

import math

import pytest
import torch

from engine.compute.kv_cache import (
    KV_FP8,
    KVLayout,
    allocate,
    bytes_per_token,
    clear_blocks,
    copy_blocks,
    dequantise,
    quantise,
)
from metrics.errors import ModelError
from tests.engine.harness import drain, generate, hand_over, make_engine, submit
from tests.engine.token.sampling.test_logprobs import random_prompts

CPU = torch.device("cpu")


def test_a_number_keeps_four_bits_of_itself_or_is_tiny_beside_its_head():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, 64, generator=generator) * torch.logspace(-12, 12, 200, 2)[:, None, None]
    x[:, :, 0] *= 1000  # an outlier, as keys have them
    x[7] = 0
    stored, scales = quantise(x)
    back = dequantise(stored, scales, torch.float32)
    bound = torch.maximum(2**-4 * x.abs(), 2**-10 / 448 * x.abs().amax(-1, keepdim=True))
    assert ((back - x).abs() <= bound * (1 + 1e-5)).all()
    assert torch.equal(back[7], x[7])
    torch.testing.assert_close(back.abs().amax(-1), x.abs().amax(-1))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_none(bad):
    x = torch.ones(2, 4)
    x[0, 1] = bad
    back = dequantise(*quantise(x), torch.float32)
    assert not back[0].isfinite().all() and back[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, KV_FP8])
def test_blocks_are_cleared_and_copied_with_their_scales(dtype):
    cache = allocate(KVLayout(2, 3, 8), num_layers=2, num_blocks=5, block_size=4, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    content = torch.randn(cache.values.shape, generator=generator)
    stored, scales = quantise(content) if dtype == KV_FP8 else (content, None)
    cache.values.copy_(stored)
    if scales is not None:
        cache.scales.copy_(scales)
    copy_blocks(cache, torch.tensor([0, 1]), torch.tensor([1, 3]))
    clear_blocks(cache, torch.tensor([2]))
    parts = [(cache.values.float(), stored.float())] + ([(cache.scales, scales)] if scales is not None else [])
    for part, before in parts:
        expected = before.clone()
        expected[:, :, [1, 3]] = expected[:, :, [0, 1]].clone()
        expected[:, :, 2] = 0
        assert torch.equal(part, expected)
    assert cache.nbytes == 20 * bytes_per_token(KVLayout(2, 3, 8), 2, dtype)


def prompt_logprobs(folder, prompts: list[list[int]], **settings) -> torch.Tensor:
    engine, published = make_engine(folder, **settings)
    hand_over(engine, [submit(f"r{i}", p, 2, prompt_logprobs=0) for i, p in enumerate(prompts)])
    drain(engine, check=True)
    return torch.tensor([told.logprob for i in range(len(prompts)) for told in published.prompt_logprobs[f"r{i}"]])


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v2-lite", "mpt"])
def test_log_probabilities_move_little_more_than_by_computing_in_sixteen_bits(family, checkpoints):
    """On random weights, which react to every rounding: two to four times as much as by bfloat16."""
    prompts = random_prompts((90, 40, 17))
    exact = prompt_logprobs(checkpoints[family], prompts)
    moved = (prompt_logprobs(checkpoints[family], prompts, kv_cache_dtype="fp8") - exact).abs().mean()
    usual = (prompt_logprobs(checkpoints[family], prompts, dtype="bfloat16") - exact).abs().mean()
    assert 0 < moved < 5 * usual


def test_chunks_reuse_and_preemption_leave_the_tokens_as_they_are(checkpoints):
    prompts = random_prompts((60, 50, 70))
    prompts.append(prompts[0])
    whole, _ = generate(checkpoints["qwen3"], prompts, 12, kv_cache_dtype="fp8", prefix_caching=False)
    tight = {"num_kv_blocks": 10, "max_model_len": 100, "max_num_batched_tokens": 24}
    cut, published = generate(checkpoints["qwen3"], prompts, 12, kv_cache_dtype="fp8", **tight)
    assert cut == whole
    assert any(record.preempted_ids for record in published.records), "nobody was preempted"


def test_a_cache_in_eight_bits_is_counted_as_such(checkpoints):
    engine, _ = make_engine(checkpoints["qwen3"], kv_cache_dtype="fp8", num_kv_blocks=20, block_size=16)
    runner = engine.runner
    assert runner.kv_cache.values.dtype == KV_FP8
    assert runner.kv_cache.nbytes == 20 * 16 * runner.shape.kv_bytes_per_token


def test_a_backend_that_cannot_read_it_is_refused(checkpoints):
    with pytest.raises(ModelError, match=r"attention_backend=cpp cannot be had.*float8"):
        make_engine(checkpoints["qwen3"], kv_cache_dtype="fp8", attention_backend="cpp")
    with pytest.raises(ModelError, match="attention_backend=triton cannot be had: it needs a CUDA device"):
        make_engine(checkpoints["qwen3"], device="cpu", attention_backend="triton")


@pytest.mark.parametrize("dtype", [torch.float32, KV_FP8])
def test_the_vectors_of_a_head_of_a_block_are_neighbours(dtype):
    cache = allocate(KVLayout(2, 3, 8), num_layers=2, num_blocks=5, block_size=4, dtype=dtype, device=CPU)
    assert cache.values.shape == (2, 2, 5, 4, 3, 8)
    for layer in cache.layers():
        assert layer.values.stride()[2:] == (8, 4 * 8, 1)
        assert layer.strides() == (1, 4)
