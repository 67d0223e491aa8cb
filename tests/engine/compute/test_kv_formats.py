"""Keys and values in 8 and 4 bits: what they cost in accuracy, and that nothing else about the engine changes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.compute.attention.backend import AttentionInputs, AttentionSpec
from sojourn.engine.compute.attention.cpp_backend import CppAttention
from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.kv_cache import KVLayout, LayerCache, allocate, bytes_per_token, clear_blocks, copy_blocks
from sojourn.engine.compute.kv_formats import KV_FP8, KV_INT4, KV_INT8, QUANTISED, dequantise, quantise
from sojourn.engine.compute.operations.backend import HeadSpec, Operations
from sojourn.engine.compute.operations.cpp_backend import CppOperations
from sojourn.engine.config import model_folder
from sojourn.engine.runner.build import check_kv_format
from sojourn.engine.token.models.mpt import alibi_slopes
from sojourn.engine.token.text.tokenizer import Tokenizer
from sojourn.metrics.errors import ModelError
from tests.engine.compute.attention_inputs import by_head
from tests.engine.compute.kv_errors import error_bound
from tests.engine.compute.test_cpp_kernels import make_step, randn
from tests.engine.harness import drain, generate, hand_over, make_engine, submit
from tests.engine.token.sampling.test_logprobs import random_prompts

FORMATS = list(QUANTISED.values())
CPU = torch.device("cpu")


@settings(max_examples=60, derandomize=True)
@given(
    dtype=st.sampled_from(FORMATS),
    half=st.integers(1, 70),
    size=st.integers(-30, 30),
    outlier=st.sampled_from([0.0, 1.0, 1000.0]),
    shift=st.sampled_from([0.0, -3.0, 50.0]),
    seed=st.integers(0, 99),
)
def test_a_number_is_off_by_no_more_than_the_bound(dtype, half, size, outlier, shift, seed):
    x = randn(9, 3, 2 * half, seed=seed) + shift
    x[:, :, 0] *= outlier  # as keys have them
    x *= 2.0**size
    x[7] = 0
    back = dequantise(*quantise(x, dtype), torch.float32)
    assert ((back - x).abs() <= error_bound(x, dtype) * (1 + 1e-5)).all()
    assert torch.equal(back[7], x[7])


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_no_number_stays_none(dtype, bad):
    x = torch.ones(2, 4)
    x[0, 1] = bad
    back = dequantise(*quantise(x, dtype), torch.float32)
    assert not back[0].isfinite().any() and back[1].isfinite().all()


@settings(max_examples=60, derandomize=True)
@given(
    dtype=st.sampled_from(FORMATS),
    half=st.integers(1, 70),
    kv_heads=st.integers(1, 3),
    block_size=st.integers(1, 20),
    new=st.integers(1, 30),
    size=st.integers(-30, 30),
    bad=st.sampled_from([1.0, 1.0, math.inf, math.nan]),
)
def test_the_cpu_kernels_write_the_bits_of_the_reference(library, dtype, half, kv_heads, block_size, new, size, bad):
    dim, blocks = 2 * half, 31 // block_size + 1
    slots = torch.randperm(blocks * block_size, generator=torch.Generator().manual_seed(half))[:new]
    slots[new // 2] = -1
    key, value, qkv = (
        randn(new, *shape, seed=seed) * 2.0**size
        for seed, shape in enumerate([(kv_heads, dim), (kv_heads, dim), (4 * kv_heads * dim,)])
    )
    key[0, 0, 1] *= bad
    heads = HeadSpec(2 * kv_heads, kv_heads, dim, 1e-6)
    caches = [allocate(KVLayout(2, kv_heads, dim), 2, blocks, block_size, dtype, CPU) for _ in range(2)]
    for cache, operations in zip(caches, (Operations(), CppOperations(library)), strict=True):
        first, second = cache.layers()
        operations.write(key, value, slots, first)
        operations.write_heads(qkv, heads, None, slots, second)
    expected, own = ([part.flatten(0, 4) for part in (one.values.view(torch.uint8), one.scales)] for one in caches)
    finite = expected[1].flatten(1).isfinite().all(1) if dtype == KV_INT4 else expected[1].isfinite()
    kept = own[1].flatten(1).isfinite().all(1) if dtype == KV_INT4 else own[1].isfinite()
    assert (finite == kept).all()
    assert all((a[finite] == b[finite]).all() for a, b in zip(own, expected, strict=True))


def check_attention(library, dtype, items, heads, kv_heads, dim, value_dim, block_size, window, sinks, alibi) -> None:
    inputs, num_slots = make_step(items, block_size)
    query = randn(len(inputs.slots), heads, dim)
    cache = randn(2 if value_dim == dim else 1, num_slots, kv_heads, dim, seed=1)
    spec = AttentionSpec(
        1 / math.sqrt(dim), value_dim, window, alibi_slopes(heads) if alibi else None, sink_tokens=sinks
    )
    codes, scales = quantise(cache, dtype)
    held = LayerCache(by_head(codes.view(torch.uint8), block_size).view(dtype), by_head(scales, block_size))
    expected = attend(TorchAttention(), inputs, query.double(), held, spec)
    output = attend(CppAttention(library), inputs, query, held, spec)
    torch.testing.assert_close(output.double(), expected, rtol=4e-6, atol=4e-6)


def attend(backend, inputs: AttentionInputs, query, held: LayerCache, spec: AttentionSpec) -> torch.Tensor:
    backend.begin(inputs)
    return backend.attend(query, held, spec)


@settings(max_examples=30, derandomize=True)
@given(
    dtype=st.sampled_from(FORMATS),
    items=st.lists(st.tuples(st.integers(0, 130) | st.just(600), st.integers(1, 40)), min_size=1, max_size=3),
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 7]),
    half=st.integers(1, 70),
    block_size=st.integers(1, 40),
    window=st.none() | st.integers(1, 150),
    sinks=st.integers(0, 20),
    alibi=st.booleans(),
    latent=st.booleans(),
)
def test_attention_on_a_cpu_reads_what_the_reference_reads(
    library, dtype, items, kv_heads, group, half, block_size, window, sinks, alibi, latent
):
    items.sort(key=lambda item: item[1] > 1)  # single tokens come first
    dim = 2 * half
    value_dim = max(1, dim - 6) if latent else dim
    check_attention(library, dtype, items, kv_heads * group, kv_heads, dim, value_dim, block_size, window, sinks, alibi)


@pytest.mark.parametrize("dtype", [torch.float32, *FORMATS])
def test_blocks_are_cleared_and_copied_with_their_scales(dtype):
    cache = allocate(KVLayout(2, 3, 8), num_layers=2, num_blocks=5, block_size=4, dtype=dtype, device=CPU)
    generator = torch.Generator().manual_seed(0)
    content = torch.randn((*cache.values.shape[:-1], 8), generator=generator)
    stored, scales = quantise(content, dtype) if dtype in FORMATS else (content, None)
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


@settings(max_examples=40, derandomize=True)
@given(
    dtype=st.sampled_from(FORMATS),
    half=st.integers(1, 64),
    context=st.integers(1, 60),
    sharpness=st.sampled_from([0.1, 1.0, 4.0]),
    seed=st.integers(0, 99),
)
def test_the_error_of_attention_is_within_its_bound(dtype, half, context, sharpness, seed):
    """A key that is off by e_k moves its score by scale * |q| e_k at most, s; each weight then changes by a factor
    within e^(2s). So the output is off by (e^(2s) - 1) max|v| + max e_v at most (docs/results/kv_cache.md)."""
    dim = 2 * half
    query, scale = randn(dim, seed=seed).double() * sharpness, 1 / math.sqrt(dim)
    exact = randn(2, context, dim, seed=seed + 1)
    stored = dequantise(*quantise(exact, dtype), torch.float64)
    (exact_keys, exact_values), (keys, values) = exact.double(), stored
    output = (keys @ query * scale).softmax(0) @ values
    expected = (exact_keys @ query * scale).softmax(0) @ exact_values
    key_error, value_error = error_bound(exact, dtype).double()
    shift = (key_error @ query.abs() * scale).max()
    bound = (2 * shift).exp().sub(1) * values.abs().amax(0) + value_error.amax(0)
    assert ((output - expected).abs() <= bound * (1 + 1e-5)).all()


# Nats per token that a format may cost the bundled model: docs/results/kv_cache.md states them.
NATS = {"fp8": 0.01, "int8": 0.001, "int4": 0.02}


def test_the_bundled_model_loses_no_more_than_the_stated_nats_per_token():
    model = model_folder("tiny-model")
    ids = Tokenizer(model).encode((model / "prompts.txt").read_text("utf-8"))
    prompts = [ids[begin : begin + 500] for begin in range(0, 3000, 500)]
    exact = prompt_logprobs(model, prompts)
    for name, bound in NATS.items():
        lost = (exact - prompt_logprobs(model, prompts, kv_cache_dtype=name)).mean()
        assert -bound < lost < bound, (name, lost)


# Changes of log-probabilities by the format, in those that bfloat16 makes.
CHANGES = {"fp8": 5, "int8": 2, "int4": 20}


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v2-lite", "mpt"])
def test_log_probabilities_move_little_more_than_by_computing_in_sixteen_bits(family, checkpoints):
    """On random weights, which react to every rounding."""
    prompts = random_prompts((90, 40, 17))
    exact = prompt_logprobs(checkpoints[family], prompts)
    usual = (prompt_logprobs(checkpoints[family], prompts, dtype="bfloat16") - exact).abs().mean()
    for name, bound in CHANGES.items():
        moved = (prompt_logprobs(checkpoints[family], prompts, kv_cache_dtype=name) - exact).abs().mean()
        assert 0 < moved < bound * usual, name


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("family", ["qwen3", "deepseek-v2-lite"])
def test_the_cpu_kernels_and_the_reference_give_the_same_log_probabilities(name, family, checkpoints):
    prompts = random_prompts((90, 40))
    ours = prompt_logprobs(checkpoints[family], prompts, kv_cache_dtype=name)
    reference = {"attention_backend": "torch", "fused_operations": "off"}
    theirs = prompt_logprobs(checkpoints[family], prompts, kv_cache_dtype=name, **reference)
    assert (ours - theirs).abs().mean() < 1e-3  # a code more or less where a number lies between two


@pytest.mark.parametrize("name", QUANTISED)
def test_chunks_reuse_and_preemption_leave_the_tokens_as_they_are(name, checkpoints):
    prompts = random_prompts((60, 50, 70))
    prompts.append(prompts[0])
    whole, _ = generate(checkpoints["qwen3"], prompts, 12, kv_cache_dtype=name, prefix_caching=False)
    tight = {"num_kv_blocks": 10, "max_model_len": 100, "max_num_batched_tokens": 24}
    cut, published = generate(checkpoints["qwen3"], prompts, 12, kv_cache_dtype=name, **tight)
    assert cut == whole
    assert any(record.preempted_ids for record in published.records), "nobody was preempted"


@pytest.mark.parametrize(("name", "dtype"), QUANTISED.items())
def test_a_quantised_cache_is_counted_as_such(name, dtype, checkpoints):
    engine, _ = make_engine(checkpoints["qwen3"], kv_cache_dtype=name, num_kv_blocks=20, block_size=16)
    runner = engine.runner
    assert runner.eager.kv_cache.values.dtype == dtype
    assert runner.eager.kv_cache.nbytes == 20 * 16 * runner.shape.kv_bytes_per_token == runner.memory.kv_bytes


def test_a_backend_that_cannot_read_it_is_refused(checkpoints):
    with pytest.raises(ModelError, match=r"attention_backend=cpp cannot be had.*bfloat16 on cpu with keys in.*float8"):
        make_engine(checkpoints["qwen3"], kv_cache_dtype="fp8", dtype="bfloat16", attention_backend="cpp")
    with pytest.raises(ModelError, match="attention_backend=triton cannot be had: it needs a CUDA device"):
        make_engine(checkpoints["qwen3"], device="cpu", attention_backend="triton")


def test_vectors_without_two_halves_have_no_int4():
    check_kv_format(KVLayout(2, 1, 9), KV_INT8, CPU)
    check_kv_format(KVLayout(1, 1, 576), KV_INT4, CPU)
    with pytest.raises(ModelError, match="int4 needs heads of an even size, and these have 9"):
        check_kv_format(KVLayout(2, 1, 9), KV_INT4, CPU)
    with pytest.raises(ModelError, match="no kernel for latent attention on CUDA"):
        check_kv_format(KVLayout(1, 1, 576), KV_INT4, torch.device("cuda"))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 8), (KV_FP8, 8), (KV_INT8, 8), (KV_INT4, 4)])
def test_the_vectors_of_a_head_of_a_block_are_neighbours(dtype, size):
    cache = allocate(KVLayout(2, 3, 8), num_layers=2, num_blocks=5, block_size=4, dtype=dtype, device=CPU)
    assert cache.values.shape == (2, 2, 5, 4, 3, size)
    for layer in cache.layers():
        assert layer.values.stride()[2:] == (size, 4 * size, 1)
        assert layer.strides() == (1, 4)
