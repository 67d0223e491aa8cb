"""Products of a CUDA device with quantised weights against the dequantised weights, in Triton's interpreter or on the
device."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from tests.engine.compute.triton_harness import DEVICE, assert_no_spills

pytest.importorskip("triton")

from bench.gpu.compilation import Compilation
from sojourn.engine.compute.quantisation.cuda import E2M1, FP8, Fp8Method, cuda_kernels
from sojourn.engine.compute.triton import narrow_product, quantised_product
from sojourn.engine.compute.triton.experts import Tiles
from sojourn.engine.compute.triton.narrow_product import LARGEST, int8_product, round_rows
from sojourn.engine.compute.triton.quantised_product import unit_of
from tests.engine.compute.quantisation.test_cpu_groups import quantised

HOPPER = (9, 0)


def method(matrix: QuantisedMatrix, bias: torch.Tensor | None, capability: tuple[int, int] = HOPPER):
    kernel = next(kernel for kernel in cuda_kernels(DEVICE, capability) if kernel.fits(matrix))
    made = kernel.make(matrix, None if bias is None else bias.to(DEVICE))
    assert made.nbytes == kernel.nbytes(matrix) + (0 if bias is None else bias.nbytes)
    # A zero that is a fraction may be rounded where signed codes become unsigned.
    torch.testing.assert_close(made.dequantised().cpu(), matrix.dequantised(), rtol=0, atol=1e-4)
    return kernel.name, made


def check(matrix: QuantisedMatrix, rows: int, dtype: torch.dtype, bias: bool, name: str) -> None:
    x = torch.randn(rows, matrix.shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
    added = torch.linspace(-1, 1, matrix.shape[0]).to(dtype) if bias else None
    found, made = method(matrix, added)
    product = made.apply(x.to(DEVICE)).cpu()
    weight = made.dequantised().cpu().to(dtype).double()  # the kernel rounds weights to the dtype of activations
    exact = x.double() @ weight.T + (0 if added is None else added)
    # Sums are of float32 in any order; the result is rounded once.
    size = x.double().abs() @ weight.abs().T + 1
    bound = matrix.shape[1] * 2.0**-24 * size + torch.finfo(dtype).eps * exact.abs()
    assert found == name and product.dtype == dtype
    assert ((product - exact).abs() <= bound).all()


@settings(max_examples=12)
@given(
    rows=st.sampled_from([1, 3, 17]), outputs=st.sampled_from([5, 48]), group=st.sampled_from([16, 32, 64, 96]),
    bits=st.sampled_from([3, 4, 8]), signed=st.booleans(), order=st.booleans(), bias=st.booleans(),
    zeros=st.sampled_from(["none", "whole", "fractions"]), dtype=st.sampled_from([torch.float16, torch.float32]),
)  # fmt: skip
def test_product_is_that_of_the_dequantised_weights(rows, outputs, group, bits, signed, order, bias, zeros, dtype):
    matrix = quantised(outputs, 2 * group, group, bits, signed=signed, order=order, zeros=zeros)
    check(matrix, rows, dtype, bias, "int8" if bits == 8 else "int4")


def e2m1(outputs: int, inputs: int, group: int) -> QuantisedMatrix:
    dice = torch.Generator().manual_seed(0)
    codes = E2M1[torch.randint(0, 16, (outputs, inputs), generator=dice)].to(FP8)
    return QuantisedMatrix(codes, 2.0 ** torch.randint(-3, 3, (outputs, inputs // group)), None, group, 4)


@pytest.mark.parametrize("group", [16, 32])  # NVFP4's and MXFP4's
def test_product_with_floats_of_four_bits_is_that_of_their_values(group):
    check(e2m1(24, 64, group), 3, torch.float16, True, "int4")


def test_product_with_fp8_weights_of_blocks_keeps_the_activations():
    codes = torch.randn(24, 64, generator=torch.Generator().manual_seed(0)).to(FP8)
    check(QuantisedMatrix(codes, torch.rand(24, 2) + 0.1, None, 32, 8), 3, torch.float16, False, "fp8")


@pytest.mark.parametrize("dtype", LARGEST)
def test_rows_are_rounded_each_by_its_own_largest_number(dtype):
    x = torch.randn(5, 1500, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-4, 1, 50, 0, 1])[:, None]
    x[4, 1400] = torch.inf
    rounded, scales = (part.cpu() for part in round_rows(x.to(DEVICE), dtype))
    most = x[:3].abs().amax(1, keepdim=True)
    torch.testing.assert_close(scales[:3], most / LARGEST[dtype])
    assert scales[3] == 0 and scales[4].isnan() and not rounded[3:].float().isnan().any()
    step = most / 254 if dtype == torch.int8 else torch.maximum(x[:3].abs() / 16, most / 448 / 2**10)
    assert ((rounded[:3].float() * scales[:3] - x[:3]).abs() <= step * 1.0001).all()
    alone = round_rows(x[1:2].to(DEVICE), dtype)
    assert torch.equal(alone[0].float().cpu(), rounded[1:2].float()) and torch.equal(alone[1].cpu(), scales[1:2])


@pytest.mark.parametrize("rows", [1, 17])
def test_int8_product_is_exact_but_for_its_scales(rows):
    dice = torch.Generator().manual_seed(rows)
    codes = torch.randint(-127, 128, (40, 72), generator=dice).to(torch.int8)
    matrix = QuantisedMatrix(codes, torch.rand(40, 1, generator=dice), None, 72, 8, activations="int8")
    x, bias = torch.randn(rows, 72, generator=dice), torch.randn(40, generator=dice)
    name, made = method(matrix, bias)
    product = made.apply(x.to(DEVICE)).cpu()
    rounded, steps = (part.cpu() for part in round_rows(x.to(DEVICE), torch.int8))
    sums = rounded.double() @ codes.double().T
    exact = sums * steps.double() * matrix.scales[:, 0].double() + bias
    assert name == "int8"
    assert ((product - exact).abs() <= 4 * 2.0**-24 * (exact - bias).abs() + 2.0**-23 * exact.abs()).all()
    small = int8_product(x.to(DEVICE), codes.to(DEVICE), matrix.scales[:, 0].to(DEVICE), bias.to(DEVICE),
                         Tiles(16, 16, 32, 4, 2))  # fmt: skip
    assert torch.equal(small.cpu(), product)  # whatever the tiles


@pytest.mark.parametrize("bias", [False, True])
def test_fp8_product_is_that_of_the_rounded_rows(bias):
    if DEVICE.type == "cuda" and torch.cuda.get_device_capability() not in ((8, 9), (9, 0)):
        pytest.skip("no scaled product by row")
    dice = torch.Generator().manual_seed(0)
    codes = torch.randn(32, 64, generator=dice).to(FP8)
    matrix = QuantisedMatrix(codes, torch.rand(32, 1, generator=dice) + 0.1, None, 64, 8, activations="fp8")
    x, added = torch.randn(7, 64, generator=dice), torch.randn(32, generator=dice).bfloat16() if bias else None
    name, made = method(matrix, added)
    product = made.apply(x.bfloat16().to(DEVICE)).cpu()
    rounded, steps = (part.cpu() for part in round_rows(x.bfloat16().to(DEVICE), FP8))
    exact = (rounded.double() * steps) @ matrix.dequantised().double().T
    size = exact.abs() + (0 if added is None else added.abs())
    # The product and the sum with the bias are each rounded to bfloat16; tensor cores keep 14 bits of a sum.
    accumulated = 2.0**-13 * ((rounded.double() * steps).abs() @ matrix.dequantised().double().abs().T)
    assert name == "fp8" and isinstance(made, Fp8Method) and product.dtype == torch.bfloat16
    assert ((product - exact - (0 if added is None else added)).abs() <= 2.0**-8 * 2 * size + accumulated).all()


def test_what_a_device_lacks_is_left_to_be_dequantised():
    fp8 = QuantisedMatrix(torch.empty(32, 64, dtype=FP8), torch.empty(32, 1), None, 64, 8, activations="fp8")
    assert [kernel.name for kernel in cuda_kernels(DEVICE, HOPPER) if kernel.fits(fp8)] == ["fp8", "fp8"]
    assert not any(kernel.fits(fp8) for kernel in cuda_kernels(DEVICE, (8, 0)))
    odd = QuantisedMatrix(torch.empty(32, 60, dtype=torch.uint8), torch.empty(32, 1), None, 60, 4)
    assert not any(kernel.fits(odd) for kernel in cuda_kernels(DEVICE, HOPPER))


@pytest.mark.parametrize(
    ("inputs", "group", "unit"), [(1024, 128, 128), (1024, 32, 128), (96, 32, 32), (160, 160, 32), (60, 60, None)]
)
def test_steps_have_whole_groups_or_lie_in_one(inputs, group, unit):
    assert unit_of(inputs, group, True) == unit


def grouped(codes: str, tiles: Tiles, **settings) -> Compilation:
    """What GroupsMethod would have compiled, for activations in bfloat16."""
    tables = {"zeros": "*fp32:16", "order": "*i32:16", "bias": "*bf16:16"} if settings.pop("tables", False) else {}
    pointers = {"x": "*bf16:16", "codes": codes, "scales": "*fp32:16", **tables, "out": "*bf16:16"}
    numbers = {"num_rows": "i32", **dict.fromkeys(("x_stride", "depth_size", "size"), "i32:16")}
    constants = {f"{name}_pointer": None for name in ("zeros", "order", "bias") if name not in tables}
    constants |= {"GROUP": 128, "UNIT": 128, "PACKED": True, "E2M1": False, "ZERO": 0.0, "PRECISION": "tf32"} | settings
    constants |= {"ROWS": tiles.rows, "COLUMNS": tiles.columns}
    signature = {f"{name}_pointer": kind for name, kind in pointers.items()} | numbers
    kernel = "sojourn.engine.compute.triton.quantised_product:quantised_product_kernel"
    return Compilation(kernel, signature, constants, tiles.num_warps, tiles.num_stages)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_kind_of_codes_compiles_for_hopper_and_keeps_its_registers():
    jobs = []
    for rows in (1, 32, 64, 512):
        tiles = quantised_product.tiles_for(rows, 4096, torch.bfloat16)
        jobs += [grouped("*u8:16", tiles, ZERO=8.0), grouped("*u8:16", tiles, tables=True)]
        jobs += [grouped("*u8:16", tiles, E2M1=True, GROUP=16), grouped("*fp8e4nv:16", tiles, PACKED=False)]
    assert_no_spills(jobs)


@pytest.mark.slow
def test_products_of_eight_bits_compile_for_hopper_and_keep_their_registers():
    jobs, module = [], "sojourn.engine.compute.triton.narrow_product"
    for rows in (1, 32, 64, 512):
        tiles = narrow_product.tiles_for(rows, 4096)
        pointers = {"x": "*i8:16", "x_scales": "*fp32:16", "weight": "*i8:16", "scales": "*fp32:16", "out": "*bf16:16"}
        numbers = {"num_rows": "i32", "depth_size": "i32:16", "size": "i32:16"}
        signature = {f"{name}_pointer": kind for name, kind in pointers.items()} | numbers
        sizes = {"bias_pointer": None, "ROWS": tiles.rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth}
        jobs.append(Compilation(f"{module}:int8_product_kernel", signature, sizes, tiles.num_warps, tiles.num_stages))
    for dtype, largest in (("*i8:16", 127.0), ("*fp8e4nv:16", 448.0)):
        signature = {"x_pointer": "*bf16:16", "rounded_pointer": dtype, "scales_pointer": "*fp32:16"}
        signature |= {"x_stride": "i32:16", "size": "i32:16"}
        jobs.append(Compilation(f"{module}:round_rows_kernel", signature, {"LARGEST": largest, "BLOCK": 1024}))
    assert_no_spills(jobs)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("activations", [None, "int8", "fp8"])
def test_a_graph_holds_a_product_and_gives_its_bits(activations):
    dice, dtype = torch.Generator().manual_seed(0), FP8 if activations == "fp8" else torch.int8
    codes = torch.randint(-7, 8, (64, 128), generator=dice).to(dtype)
    group, bits = (32, 4) if activations is None else (128, 8)
    scales = torch.rand(64, 128 // group, generator=dice)
    matrix = QuantisedMatrix(codes, scales, None, group, bits, activations=activations)
    kernel = next(k for k in cuda_kernels(DEVICE, torch.cuda.get_device_capability()) if k.fits(matrix))
    made, x = kernel.make(matrix, None), torch.randn(5, 128, generator=dice).to(DEVICE, torch.bfloat16)
    eager, graph = made.apply(x), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made.apply(x)
    graph.replay()
    assert torch.equal(captured, eager)
