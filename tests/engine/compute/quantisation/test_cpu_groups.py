"""Products with quantised weights on a CPU are those of the dequantised weights and of the activations as rounded."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.compute.cpp.extension import library
from sojourn.engine.compute.cpp.matrices import LARGEST_INNER, CppWeight, groups_kernel
from sojourn.engine.compute.quantisation import cpu_groups
from sojourn.engine.compute.quantisation.cpu import cpu_kernels
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix

EPSILON = 2.0**-24  # of one rounding to float32

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(library() is None or groups_kernel(library()) is None, reason="this machine has no such kernel"),
]


@pytest.fixture(autouse=True)
def one_thread():
    """A second one would only wait for a core here."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def quantised(
    outputs: int, inputs: int, group: int, bits: int = 4, *, zeros: str = "none", signed: bool = False,
    order: bool = False, half: bool = True, seed: int = 0,
) -> QuantisedMatrix:  # fmt: skip
    dice = torch.Generator().manual_seed(seed)
    low, high = (-(1 << bits - 1), 1 << bits - 1) if signed else (0, 1 << bits)
    codes = torch.randint(low, high, (outputs, inputs), generator=dice).to(torch.int8 if signed else torch.uint8)
    table = (outputs, inputs // group)
    scales, whole = torch.rand(table, generator=dice) + 0.1, torch.randint(low, high, table, generator=dice)
    found = {"none": None, "one": torch.full(table, 3.0), "whole": whole.float(), "fractions": scales * high}[zeros]
    places = torch.randperm(inputs, generator=dice) if order else None
    return QuantisedMatrix(codes, scales.half().float() if half else scales, found, group, bits, places)


def packed(matrix: QuantisedMatrix, bias: torch.Tensor | None = None) -> CppWeight:
    kernel = next(kernel for kernel in cpu_kernels() if kernel.fits(matrix))
    return kernel.make(matrix, bias)


def rounded(x: torch.Tensor, matrix: QuantisedMatrix) -> torch.Tensor:
    """Activations as the kernel may round them: to 127 steps of the largest of a token's group. float64."""
    order = torch.arange(matrix.shape[1]) if matrix.order is None else matrix.order
    groups = x[:, order].unflatten(1, (-1, matrix.group))
    most = groups.abs().amax(-1, keepdim=True)
    # Rounded once, as the kernel does: `127 / most` is the rounded reciprocal times 127.
    inverse = torch.full_like(most, 127) / most
    steps = torch.where(most > 0, groups * inverse, 0.0).round()
    found = torch.empty_like(x, dtype=torch.float64)
    found[:, order] = (steps.double() * (most / 127).double()).flatten(1)
    return found


GROUPS = st.sampled_from([4, 16, 20, 32, 64, 128])


@settings(max_examples=60)
@given(
    rows=st.sampled_from([1, 2, 5, 6, 7, 13, 101]), outputs=st.integers(1, 140), group=GROUPS,
    groups=st.integers(1, 5), bits=st.sampled_from([2, 4, 5, 8]), signed=st.booleans(), order=st.booleans(),
    zeros=st.sampled_from(["none", "one", "whole", "fractions"]), half=st.booleans(), bias=st.booleans(),
    channel=st.integers(0, 50), seed=st.integers(0, 1000),
)  # fmt: skip
def test_product_is_that_of_the_dequantised_weights_and_the_rounded_activations(
    rows, outputs, group, groups, bits, signed, order, zeros, half, bias, channel, seed
):
    inputs = channel or group * groups  # one group may be a whole channel, of any length
    matrix = quantised(outputs, inputs, channel or group, bits, zeros=zeros, signed=signed, order=order, half=half,
                       seed=seed)  # fmt: skip
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs, generator=dice) * 10 ** torch.randn(rows, 1, generator=dice)
    added = torch.randn(outputs, generator=dice) if bias else None
    expected, weight = rounded(x, matrix), matrix.dequantised().double()
    # A group's sum is exact, or rounded once where its zero is a fraction; then its scale, the step of the activations,
    # and one addition a group are rounded. Codes and zeros cancel, so that the bound is that of both apart.
    largest = matrix.scales.abs().amax() * (1 << bits) * 2 * expected.abs().sum(1, keepdim=True)
    bound = (inputs / matrix.group + 6) * EPSILON * (largest + (0 if added is None else added.abs()))
    product = packed(matrix, added).apply(x)
    exact = expected @ weight.T + (0 if added is None else added)
    assert ((product - exact).abs() <= bound).all()


@pytest.mark.parametrize("zeros", ["none", "fractions"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 256)])
def test_bits_of_a_row_depend_on_no_other_row_and_no_number_of_threads(bits, group, zeros):
    weight = packed(quantised(130, 1024, group, bits, zeros=zeros, half=False), torch.randn(130))
    x = torch.randn(201, 1024)
    together = weight.apply(x)
    torch.set_num_threads(3)
    assert torch.equal(weight.apply(x), together)
    torch.set_num_threads(1)
    for rows in (1, 2, 3, 4, 5, 6, 7, 100):
        assert torch.equal(weight.apply(x[90 : 90 + rows]), together[90 : 90 + rows])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_overflowed_is_seen_in_its_row_and_in_no_other(bad):
    weight, x = packed(quantised(70, 96, 32)), torch.randn(9, 96)
    clean = weight.apply(x)
    x[4, 95] = bad
    product = weight.apply(x)
    assert product[4].isnan().all()
    assert torch.equal(product[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_zeros_and_the_smallest_numbers_are_no_division_by_zero():
    weight, bias = quantised(20, 64, 32), torch.randn(20)
    x = torch.randn(2, 64)
    x[0], x[1] = 0.0, 1e-40
    assert torch.equal(packed(weight, bias).apply(x), bias.expand(2, -1))


def test_no_rows_give_no_rows():
    assert packed(quantised(70, 64, 32)).apply(torch.empty(0, 64)).shape == (0, 70)


@pytest.mark.parametrize("order", [False, True])
@pytest.mark.parametrize(("bits", "signed", "zeros"), [(3, True, "none"), (4, False, "whole"), (6, True, "one")])
def test_the_packed_weight_can_be_read_back(bits, signed, zeros, order):
    matrix = quantised(70, 96, 32, bits, signed=signed, zeros=zeros, order=order)
    weight = packed(matrix)
    assert torch.equal(weight.dequantised(), matrix.dequantised())
    assert torch.equal(packed(quantised(10, 37, 37, order=order)).dequantised(),
                       quantised(10, 37, 37, order=order).dequantised())  # fmt: skip


def test_codes_of_four_bits_take_half_a_byte_and_scales_two():
    matrix = quantised(128, 1024, 32)
    assert packed(matrix).nbytes == 128 * (1024 // 2 + 2 * 32) + 32  # and the sizes
    assert packed(quantised(128, 1024, 32, half=False)).nbytes == 128 * (1024 // 2 + 4 * 32) + 32
    assert cpu_groups.nbytes(matrix) == 128 * (1024 // 2 + 4 * 32)


@pytest.mark.parametrize(
    "matrix",
    [
        QuantisedMatrix(torch.empty(4, 12, dtype=torch.uint8, device="meta"), torch.empty(4, 2), None, 6, 4),
        QuantisedMatrix(torch.empty(4, 8, dtype=torch.float8_e4m3fn, device="meta"), torch.empty(4, 2), None, 4, 8),
        QuantisedMatrix(
            torch.empty(4, LARGEST_INNER + 1, dtype=torch.uint8, device="meta"),
            torch.empty(4, 1), None, LARGEST_INNER + 1, 8,
        ),
    ],
    ids=["a group ends within four inputs", "codes are floats", "an int32 could overflow"],
)  # fmt: skip
def test_what_the_kernel_cannot_read_is_left_to_be_dequantised(matrix):
    assert not any(kernel.fits(matrix) for kernel in cpu_kernels())
