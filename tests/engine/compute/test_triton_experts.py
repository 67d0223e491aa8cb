"""The grouped products of a mixture of experts against the torch reference."""

import pytest
import torch

from sojourn.engine.compute.operations import reference as ops
from sojourn.engine.compute.operations.reference import mixture as reference
from tests.engine.compute.triton_harness import DEVICE, SHARED_LIMIT_BYTES, Compilation, compile_for_hopper

pytest.importorskip("triton")

from sojourn.engine.compute.operations.triton_backend import TritonOperations
from sojourn.engine.compute.triton.experts import Tiles, mixture, tiles_for

SMALL = Tiles(rows=16, columns=16, depth=16, num_warps=4, num_stages=2)


def make(tokens: int, chosen: int, experts: int, hidden: int, intermediate: int, dtype: torch.dtype, used: int):
    """x, weights, experts, gate_up, down; only the first `used` experts are chosen."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=generator)
    weights = torch.rand(tokens, chosen, generator=generator)
    picked = torch.stack([torch.randperm(used, generator=generator)[:chosen] for _ in range(tokens)])
    gate_up = torch.randn(experts, 2 * intermediate, hidden, generator=generator) / hidden**0.5
    down = torch.randn(experts, hidden, intermediate, generator=generator) / intermediate**0.5
    return (x.to(DEVICE, dtype), weights.to(DEVICE), picked.to(DEVICE), gate_up.to(DEVICE, dtype),
            down.to(DEVICE, dtype))  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter multiplies no bfloat16
@pytest.mark.parametrize(
    ("tokens", "chosen", "experts", "hidden", "intermediate", "used"),
    [(1, 1, 1, 16, 16, 1), (5, 2, 4, 24, 20, 4), (23, 2, 3, 16, 40, 2), (40, 1, 5, 33, 16, 5), (3, 3, 8, 16, 16, 8)],
)
def test_a_mixture_is_that_of_torch(tokens, chosen, experts, hidden, intermediate, used, dtype):
    made = make(tokens, chosen, experts, hidden, intermediate, dtype, used)
    expected = reference(*made, ops.silu_gate)
    step = torch.finfo(dtype).eps
    # Sums in another order may round a product to its neighbour, and a few of those meet in one number.
    torch.testing.assert_close(mixture(*made, SMALL), expected, rtol=4 * step, atol=4 * step)


def biases_of(experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    sizes = 2 * intermediate, hidden
    return tuple(torch.randn(experts, size, generator=generator).to(DEVICE, dtype) for size in sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_mixture_with_biases_and_a_clamped_gate_is_that_of_torch(dtype):
    made, biases = make(23, 2, 3, 16, 40, dtype, 2), biases_of(3, 16, 40, dtype)
    made[0].mul_(5)  # beyond the clamp
    expected, step = reference(*made, ops.clamped_swish_gate, biases), torch.finfo(dtype).eps
    found = TritonOperations().mixture(*made, ops.clamped_swish_gate, biases)
    torch.testing.assert_close(found, expected, rtol=8 * step, atol=100 * step)  # of sums of numbers up to 50


def test_rows_of_a_wider_matrix_are_read_where_they_stand():
    x, *others = make(6, 2, 4, 16, 16, torch.float32, 4)
    wide = torch.cat((x, x), dim=1)
    torch.testing.assert_close(mixture(wide[:, 16:], *others, SMALL), reference(x, *others, ops.silu_gate))


def test_no_tokens_give_no_rows():
    x, weights, experts, gate_up, down = make(3, 2, 4, 16, 16, torch.float32, 4)
    assert mixture(x[:0], weights[:0], experts[:0], gate_up, down).shape == (0, 16)


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "chosen", "experts"), [(1, 8, 128), (64, 8, 128), (4096, 8, 128), (2048, 2, 8)])
def test_a_mixture_on_a_device(tokens, chosen, experts):
    made = make(tokens, chosen, experts, 2048, 768, torch.bfloat16, experts)
    wide = reference(*(t.float() if t.is_floating_point() else t for t in made), ops.silu_gate)
    error = (mixture(*made).float() - wide).norm() / wide.norm()
    own = (reference(*made, ops.silu_gate).float() - wide).norm() / wide.norm()
    assert error < 1.2 * own


@pytest.mark.gpu
def test_a_mixture_waits_for_nobody_and_fits_a_graph():
    made = make(32, 4, 16, 256, 128, torch.bfloat16, 16)
    mixture(*made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mixture(*made)
    other = make(33, 4, 16, 256, 128, torch.bfloat16, 16)
    made[0].copy_(other[0][:32])
    made[2].copy_(other[2][:32])
    graph.replay()
    torch.testing.assert_close(out, mixture(*made), rtol=0, atol=0)


def compilations() -> list[Compilation]:
    found = []
    for dtype, name, pairs, biased in (
        (torch.bfloat16, "bf16", 8, False), (torch.bfloat16, "bf16", 64 * 128, False),
        (torch.bfloat16, "bf16", 1 << 16, False), (torch.bfloat16, "bf16", 8, True),
        (torch.bfloat16, "bf16", 1 << 16, True), (torch.float16, "fp16", 8, False),
        (torch.float32, "fp32", 1 << 16, False),
    ):  # fmt: skip
        tiles, vector = tiles_for(pairs, 128, dtype), f"*{name}:16"
        shape = dict(
            ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, EXPERTS=128,
            PRECISION="ieee" if dtype == torch.float32 else "tf32",
        )  # fmt: skip
        bias, no_bias = ({"bias_pointer": vector}, {}) if biased else ({}, {"bias_pointer": None})
        sizes = {"num_experts": "i32:16", "hidden_size": "i32:16", "intermediate_size": "i32:16"}
        found += [
            Compilation(
                "sojourn.engine.compute.triton.experts:gate_up_kernel",
                {"x_pointer": vector, "order_pointer": "*i64:16", "starts_pointer": "*i32:16", "weight_pointer": vector,
                 "hidden_pointer": vector, "x_stride": "i32:16", "num_chosen": "i32"} | sizes | bias,
                shape | no_bias | {"KIND": 2 if biased else 0}, tiles.num_warps, tiles.num_stages,
            ),
            Compilation(
                "sojourn.engine.compute.triton.experts:down_kernel",
                {"hidden_pointer": vector, "order_pointer": "*i64:16", "starts_pointer": "*i32:16",
                 "weight_pointer": vector, "factors_pointer": "*fp32:16", "parts_pointer": vector} | sizes | bias,
                shape | no_bias, tiles.num_warps, tiles.num_stages,
            ),
            Compilation(
                "sojourn.engine.compute.triton.experts:sum_kernel",
                {"parts_pointer": vector, "out_pointer": vector, "num_chosen": "i32", "hidden_size": "i32:16"},
                {"BLOCK": 1024},
            ),
        ]  # fmt: skip
    return found


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spills():
    for job, resources in zip(compilations(), compile_for_hopper(compilations()), strict=True):
        print(job.kernel, job.constants, resources)
        assert resources.local_bytes == 0, job
        assert resources.shared_bytes <= SHARED_LIMIT_BYTES, job
        if "sum" not in job.kernel and job.constants["PRECISION"] == "tf32":
            assert resources.instructions["HGMMA" if job.constants["ROWS"] >= 64 else "HMMA"] > 0, job
