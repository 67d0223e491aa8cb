"""Triton's small operations of a layer against their torch references: interpreted here, on a device where one is."""

import pytest
import torch

from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.kv_formats import QUANTISED, dequantise, scale_shape, stored_dim
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.operations import reference as ops
from sojourn.engine.compute.operations.backend import HeadSpec, Operations, Rope
from tests.engine.compute.kv_errors import error_bound
from tests.engine.compute.triton_harness import DEVICE, Compilation, assert_no_spills

pytest.importorskip("triton")

from sojourn.engine.compute.operations.triton_backend import TritonOperations
from sojourn.engine.compute.triton import gated_product
from sojourn.engine.compute.triton.step_inputs import StepRows, step_inputs
from tests.engine.compute.reference_step_inputs import reference_step_inputs

TORCH = Operations()
TRITON = TritonOperations()
EPS = 1e-5
BLOCK = 3  # tokens of a block of the cache
# Steps of the last digit that a kernel may differ by: torch's sums and its sine of the same numbers round elsewhere.
ULPS = {torch.float32: 8, torch.bfloat16: 1, torch.float16: 2}  # a GPU sums in another order
KERNELS = "sojourn.engine.compute.triton"


def assert_close(actual: torch.Tensor, expected: torch.Tensor, ulps: int | None = None, scale: float = 1.0) -> None:
    """Within some steps of the last digit of the number itself, or of a number of size `scale` where terms cancel."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    step = torch.finfo(expected.dtype).eps * (ulps or ULPS[expected.dtype])
    torch.testing.assert_close(actual.float(), expected.float(), rtol=step, atol=step * scale)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


SIZES = [(1, 1), (3, 80), (2, 576), (5, 1024), (1, 7168)]
LARGE = [(64, 1024), (8192, 5120), (300, 8192)]


def check_norms(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = randn(rows, size, dtype=dtype), 3 * randn(rows, size, dtype=dtype, seed=1)
    weight = 1 + randn(size, dtype=dtype, seed=2) / 2
    for kind in (ops.rms_norm, ops.gemma_rms_norm):
        assert_close(TRITON.norm(kind, x, weight, EPS), TORCH.norm(kind, x, weight, EPS))
        expected, total = TORCH.add_norm(kind, x, residual, weight, EPS)
        normed, added = TRITON.add_norm(kind, x, residual, weight, EPS)
        assert torch.equal(added, total)
        assert_close(normed, expected)
        if dtype != torch.float32 and normed.numel() > 100:  # rounded where torch rounds, but for sums that differ
            assert (normed == expected).float().mean() > 0.98


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_norms_are_those_of_torch(rows, size, dtype):
    check_norms(rows, size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), LARGE)
def test_norms_on_a_device(rows, size, dtype):
    check_norms(rows, size, dtype)


def test_a_norm_of_columns_of_a_wider_matrix_reads_only_those():
    wide = randn(4, 100)
    weight = randn(40, seed=1)
    assert_close(TRITON.norm(ops.rms_norm, wide[:, 60:], weight, EPS), ops.rms_norm(wide[:, 60:], weight, EPS))


def test_a_norm_that_has_no_kernel_is_the_reference():
    x, residual, weight = randn(3, 16), randn(3, 16, seed=1), randn(16, seed=2)
    assert torch.equal(TRITON.norm(ops.layer_norm, x, weight, EPS), ops.layer_norm(x, weight, EPS))
    normed, total = TRITON.add_norm(ops.layer_norm, x, residual, weight, EPS)
    assert torch.equal(total, x + residual) and torch.equal(normed, ops.layer_norm(total, weight, EPS))


GATES = (ops.silu_gate, ops.gelu_gate, ops.clamped_swish_gate)


def check_gates(rows: int, size: int, dtype: torch.dtype) -> None:
    both = 3 * randn(rows, 2 * size, dtype=dtype)
    for kind in GATES:  # torch rounds the clamped one once more
        ulps = 3 if kind is ops.clamped_swish_gate else 2
        assert_close(TRITON.gate(kind, both), kind(both), ulps=8 if dtype == torch.float32 else ulps, scale=4.0)
    both[:, 0] = float("nan")
    assert all(TRITON.gate(kind, both)[:, 0].isnan().all() for kind in GATES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 48), (2, 1500)])
def test_gates_are_those_of_torch(rows, size, dtype):
    check_gates(rows, size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(64, 3072), (8192, 17408)])
def test_gates_on_a_device(rows, size, dtype):
    check_gates(rows, size, dtype)


def check_gated_product(rows: int, depth: int, size: int, dtype: torch.dtype) -> None:
    x, both = randn(rows, depth, dtype=dtype), Linear(depth, 2 * size)
    both.weight = torch.nn.Parameter(randn(2 * size, depth, dtype=dtype, seed=1) / depth**0.5, requires_grad=False)
    assert gated_product.fits(x, both.weight)
    for kind in GATES:
        # Both halves are rounded before they are multiplied: sums in another order move each by a step.
        assert_close(TRITON.gated_product(kind, x, both), TORCH.gated_product(kind, x, both), ulps=4)


@pytest.mark.parametrize(("rows", "depth", "size"), [(1, 40, 24), (20, 160, 33), (70, 72, 100)])
def test_gated_products_are_those_of_torch(rows, depth, size):
    check_gated_product(rows, depth, size, torch.float16)  # which the interpreter multiplies


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 16, 40, 64, 256])
def test_gated_products_on_a_device(rows):
    check_gated_product(rows, 1024, 3072, torch.bfloat16)


def test_large_and_biased_products_are_left_to_the_library():
    weight = torch.empty((34816, 5120), dtype=torch.bfloat16, device="meta")
    rows = {n: torch.empty((n, 5120), dtype=torch.bfloat16, device="meta") for n in (64, 65)}
    assert gated_product.fits(rows[64], weight) and not gated_product.fits(rows[65], weight)
    assert not gated_product.fits(rows[64].float(), weight.float())
    biased = Linear(40, 48, bias=True).to(DEVICE)
    torch.nn.init.normal_(biased.weight), torch.nn.init.normal_(biased.bias)
    x = randn(3, 40)
    assert_close(TRITON.gated_product(ops.silu_gate, x, biased), TRITON.gate(ops.silu_gate, biased(x)))


def make_cache(planes: int, slots: int, heads: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """Holds a number that nobody writes."""
    size, scales = (planes, -(-slots // BLOCK), heads, BLOCK), None
    if dtype in QUANTISED.values():
        per_vector, scale_dtype = scale_shape(dim, dtype)
        scales = torch.full((*size, *per_vector), 7.0, dtype=scale_dtype, device=DEVICE).transpose(2, 3)
    codes = torch.full((*size, stored_dim(dim, dtype)), 7.0, device=DEVICE).to(dtype)
    return LayerCache(codes.transpose(2, 3), scales)


def by_slot(part: torch.Tensor) -> torch.Tensor:
    return part.flatten(1, 2)


def real(cache: LayerCache) -> torch.Tensor:
    values = by_slot(cache.values)
    return values.float() if cache.scales is None else dequantise(values, by_slot(cache.scales), torch.float32)


def check_heads(
    tokens: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    norm: bool,
    rotate: bool,
    cache_dtype=None,
    kind=ops.rms_norm,
) -> None:
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    norms = [1 + randn(dim, dtype=dtype, seed=seed) / 2 for seed in (1, 2)] if norm else (None, None)
    spec = HeadSpec(heads, kv_heads, dim, EPS, *norms, kind)
    rope = None
    if rotate:
        angles = 3 * randn(50, 1, dim, seed=3)
        positions = torch.arange(tokens, device=DEVICE) * 7 % 50
        rope = Rope(angles.cos().to(dtype), angles.sin().to(dtype), positions)
    slots = torch.randperm(2 * tokens + 1, generator=torch.Generator().manual_seed(4))[:tokens].to(DEVICE)
    slots[tokens // 2] = -1
    written = make_cache(2, 2 * tokens + 1, kv_heads, dim, cache_dtype or dtype)
    query = TRITON.write_heads(qkv, spec, rope, slots, written)
    expected = make_cache(2, 2 * tokens + 1, kv_heads, dim, dtype)
    kept = slots >= 0
    whole = TORCH.write_heads(qkv, spec, rope, torch.arange(tokens, device=DEVICE), expected)
    keys_and_values = by_slot(expected.values)[:, :tokens].clone()
    expected.values.fill_(7.0)
    expected.values[:, slots[kept] // BLOCK, slots[kept] % BLOCK] = keys_and_values[:, kept]
    # The kernel rotates in float32 and rounds once, torch after each of three steps.
    assert_close(query, whole, ulps=None if dtype == torch.float32 else 3, scale=4.0)
    if cache_dtype is None:
        assert_close(written.values, expected.values, ulps=None if dtype == torch.float32 else 3, scale=4.0)
        return
    there = real(expected)[:, slots[kept]]
    rounding = 4e-6 if dtype == torch.float32 else 0.03  # of what is quantised
    assert ((real(written)[:, slots[kept]] - there).abs() <= error_bound(there, cache_dtype) * 1.1 + rounding).all()
    untouched = torch.ones(by_slot(written.values).shape[1], dtype=torch.bool, device=DEVICE)
    untouched[slots[kept]] = False
    assert (by_slot(written.scales)[:, untouched] == 7).all()
    assert (by_slot(written.values)[:, untouched].float() == 7).all()


HEADS = [
    (3, 2, 1, 64, True, True),
    (2, 4, 4, 80, False, True),
    (3, 8, 2, 128, True, True),
    (2, 3, 1, 256, False, True),
    (2, 9, 3, 16, True, False),
    (1, 2, 1, 128, True, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim", "norm", "rotate"), HEADS)
def test_heads_are_split_normed_rotated_and_written_as_torch_does(tokens, heads, kv_heads, dim, norm, rotate, dtype):
    check_heads(tokens, heads, kv_heads, dim, dtype, norm, rotate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_may_have_norms_of_gemma(dtype):
    check_heads(3, 2, 1, 64, dtype, True, True, kind=ops.gemma_rms_norm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", QUANTISED.values())
@pytest.mark.parametrize("dim", [64, 80, 16])
def test_quantised_heads_are_those_of_torch_within_the_bound(dtype, cache_dtype, dim):
    check_heads(4, 4, 2, dim, dtype, True, True, cache_dtype)


@pytest.mark.parametrize("cache_dtype", QUANTISED.values())
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_written_as_none(cache_dtype, bad):
    key, value = randn(2, 2, 1, 32)
    key[1, 0, 3] = value[1, 0, 20] = bad
    cache = make_cache(2, 2, 1, 32, cache_dtype)
    TRITON.write(key, value, torch.arange(2, device=DEVICE), cache)
    assert real(cache)[:, 0].isfinite().all()
    assert (~real(cache)[:, 1].isfinite()).flatten(1).any(1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("cache_dtype", [None, *QUANTISED.values()])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norm"), [(16, 8, 128, True), (40, 8, 80, False)])
@pytest.mark.parametrize("tokens", [1, 256, 8192])
def test_heads_on_a_device(tokens, heads, kv_heads, dim, norm, cache_dtype):
    check_heads(tokens, heads, kv_heads, dim, torch.bfloat16, norm, True, cache_dtype)


@pytest.mark.parametrize("cache_dtype", QUANTISED.values())
def test_zeros_stay_zeros(cache_dtype):
    cache = make_cache(2, 2, 1, 64, cache_dtype)
    spec = HeadSpec(1, 1, 64, EPS)
    TRITON.write_heads(torch.zeros(1, 192, device=DEVICE), spec, None, torch.tensor([1], device=DEVICE), cache)
    assert (real(cache)[:, 1] == 0).all()


@pytest.mark.parametrize("cache_dtype", [torch.float32, *QUANTISED.values()])
@pytest.mark.parametrize(("heads", "dim", "planes"), [(1, 576, 1), (3, 40, 2)])
def test_plain_writes_fill_their_slots_and_no_others(heads, dim, planes, cache_dtype):
    vectors = randn(planes, 3, heads, dim)
    slots = torch.tensor([4, -1, 0], device=DEVICE)
    cache = make_cache(planes, 6, heads, dim, cache_dtype)
    TRITON.write(vectors[0], vectors[1] if planes == 2 else None, slots, cache)
    for token, slot in ((0, 4), (2, 0)):
        error = (real(cache)[:, slot] - vectors[:, token]).abs()
        exact = cache_dtype == torch.float32
        assert (error <= (0 if exact else error_bound(vectors[:, token], cache_dtype) * 1.001)).all()
    assert (by_slot(cache.values)[:, [1, 2, 3, 5]].float() == 7).all()


def step_rows(new: list[int], past: list[int], rows: list[int], known: list[bool], spare_tokens: int = 0) -> StepRows:
    """Blocks of 4 tokens, in random order; rows of -1 are padding."""
    generator = torch.Generator().manual_seed(len(new))
    tables = torch.randperm(max(rows, default=0) * 20 + 20, generator=generator).view(-1, 20)
    starts = torch.tensor([0, *new]).cumsum(0)
    ids = torch.randint(0, 1000, (int(starts[-1]) + spare_tokens,), generator=generator)
    for begin, count, told in zip(starts[:-1].tolist(), new, known, strict=True):
        if not told:
            ids[begin + count - 1] = -1
    last_ids = 1000 + torch.arange(len(tables))
    columns = (torch.tensor(rows), starts, torch.tensor(past), ids, tables, last_ids)
    return StepRows(*(column.to(DEVICE, torch.int32) for column in columns))


STEPS = [
    ([1], [0], [0], [True], 0),
    ([1, 1, 1], [5, 0, 31], [2, 0, 3], [False, True, False], 0),
    ([1, 1, 1, 1], [9, 4, 3, 2], [1, 0, -1, -1], [False] * 4, 0),
    ([1, 3, 40, 2], [7, 0, 11, 3], [4, 2, 0, 1], [False, True, True, False], 6),
    ([70, 70, 0], [0, 1, 0], [0, 1, -1], [True, True, True], 3),
]


@pytest.mark.parametrize("step", STEPS)
def test_ids_positions_and_slots_are_made_from_the_rows(step):
    new, past, rows, _, spare = step
    inputs = step_rows(*step)
    made, reference = step_inputs(inputs, 4), reference_step_inputs(inputs, 4)
    ids, positions, slots = [], [], []
    given, tables = iter(inputs.known_ids.tolist()), inputs.block_tables.tolist()
    for count, begin, row in zip(new, past, rows, strict=True):
        for position in range(begin, begin + count):
            token = next(given)
            ids.append(0 if row < 0 else 1000 + row if token < 0 else token)
            positions.append(0 if row < 0 else position)
            slots.append(-1 if row < 0 else tables[row][position // 4] * 4 + position % 4)
    contexts = [0 if row < 0 else a + b for a, b, row in zip(new, past, rows, strict=True)]
    expected = [ids + [0] * spare, positions + [0] * spare, slots + [-1] * spare, contexts]
    for result in (made, reference):
        assert [t.tolist() for t in (result.ids, result.positions, result.slots, result.contexts)] == expected
        assert [t.dtype for t in (result.ids, result.positions, result.slots, result.contexts)] == [
            torch.int64, torch.int64, torch.int64, torch.int32,
        ]  # fmt: skip


@pytest.mark.gpu
def test_step_inputs_on_a_device():
    inputs = step_rows([1] * 200 + [30] * 5, [20] * 205, [*range(204), -1], [False] * 200 + [True] * 5, 50)
    made, reference = step_inputs(inputs, 4), reference_step_inputs(inputs, 4)
    for name in ("ids", "positions", "slots", "contexts"):
        assert torch.equal(getattr(made, name), getattr(reference, name))


def compilations() -> list[Compilation]:
    order = {"BLOCK_SIZE": 16, "TOKEN_STRIDE": 1, "HEAD_STRIDE": 16}
    found = []
    for dtype in ("bf16", "fp16", "fp32"):
        vector = f"*{dtype}:16"
        for add, gemma, block in ((True, False, 8192), (False, True, 1024)):
            names = ("x_pointer", "residual_pointer", "weight_pointer", "normed_pointer", "total_pointer")
            signature = dict.fromkeys(names, vector) | {
                "eps": "fp32",
                "x_stride": "i32:16",
                "residual_stride": "i32:16",
            }
            found.append(
                Compilation(
                    f"{KERNELS}.norms:norm_kernel", signature | {"size": "i32:16"},
                    {"ADD": add, "GEMMA": gemma, "BLOCK": block}, num_warps=block // 512,
                )
            )  # fmt: skip
        found += [
            Compilation(
                f"{KERNELS}.gate:gate_kernel",
                {"both_pointer": vector, "out_pointer": vector, "both_stride": "i32:16", "size": "i32:16"},
                {"KIND": kind, "BLOCK": 1024},
            )
            for kind in (0, 1, 2)
        ]  # fmt: skip
        stored = (vector, "*fp8e4nv:16", "*i8:16", "*u8:16")
        factors = (vector, "*fp32:16", "*fp32:16", "*bf16:16")
        for kv_format, (values, factor) in enumerate(zip(stored, factors, strict=True)):
            scales = {"scales_pointer": factor}
            tables = ("q_norm_pointer", "k_norm_pointer", "cos_pointer", "sin_pointer")
            found.append(
                Compilation(
                    f"{KERNELS}.heads:heads_kernel",
                    {"qkv_pointer": vector} | dict.fromkeys(tables, vector) | {
                        "positions_pointer": "*i64:16", "slots_pointer": "*i64:16", "query_pointer": vector,
                        "values_pointer": values, **scales, "qkv_stride": "i32:16", "value_plane": "i64:16",
                        "scale_plane": "i32:16", "eps": "fp32", "num_heads": "i32:16", "num_kv_heads": "i32",
                        "head_dim": "i32:16",
                    },
                    {"NORM": True, "GEMMA": kv_format == 1, "ROPE": True, "FORMAT": kv_format, "HEADS": 4, "HALF": 64,
                     **order},
                    num_warps=1,
                )
            )  # fmt: skip
            found.append(
                Compilation(
                    f"{KERNELS}.heads:write_kernel",
                    {
                        "plane_pointer": vector, "slots_pointer": "*i64:16", "values_pointer": values, **scales,
                        "token_stride": "i32:16", "head_stride": "i32:16", "num_kv_heads": "i32", "head_dim": "i32:16",
                    },
                    {"FORMAT": kv_format, "HEADS": 1, "BLOCK": 1024, **order},
                )
            )  # fmt: skip
    tensors = ("rows", "query_start", "past", "known", "tables", "last_ids")
    outputs = {f"{name}_pointer": "*i64:16" for name in ("ids", "positions", "slots")} | {"contexts_pointer": "*i32:16"}
    numbers = dict.fromkeys(("num_sequences", "num_tokens", "table_stride", "block_size"), "i32")
    found.append(
        Compilation(
            f"{KERNELS}.step_inputs:step_kernel",
            {f"{name}_pointer": "*i32:16" for name in tensors} | outputs | numbers, {"STEPS": 8, "BLOCK": 128},
        )
    )  # fmt: skip
    return found


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spills():
    assert_no_spills(compilations())
