"""Kernels of a CUDA device for quantised matrices: FP8 by torch's scaled product, the others by Triton."""

from collections.abc import Callable
from functools import partial

import torch

from sojourn.engine.compute.quantisation.kernels import Kernel
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.compute.quantisation.method import LinearMethod
from sojourn.engine.compute.triton.narrow_product import int8_product, round_rows
from sojourn.engine.compute.triton.quantised_product import Codes, pack, quantised_product, unit_of, unpack

FP8 = torch.float8_e4m3fn
FP8_CAPABILITIES = ((8, 9), (9, 0))  # whose scaled product takes a scale a row; see pytorch issues 153555 and 192707
FP8_CONVERSION = (8, 9)  # the first capability that makes wider floats of FP8 in one instruction
ALIGNED = 16  # inputs and outputs of torch's scaled product


def cuda_kernels(device: torch.device, capability: tuple[int, int]) -> tuple[Kernel, ...]:
    """Those of a device by its compute capability, best first. Static activation scales are not used: a scale a row is
    never coarser."""
    found = [
        ("int8", _is_int8, Int8Method, _row_bytes, capability >= (8, 0)),
        ("fp8", _is_fp8, Fp8Method, _row_bytes, capability in FP8_CAPABILITIES),
        ("int4", _has_few_bits, GroupsMethod, group_bytes, True),
        ("int8", _has_bytes, GroupsMethod, group_bytes, True),
        ("fp8", _has_floats, GroupsMethod, group_bytes, capability >= FP8_CONVERSION),
    ]
    return tuple(
        Kernel(name, fits, partial(_made, method, device), nbytes) for name, fits, method, nbytes, has in found if has
    )


def _made(
    method: Callable[..., LinearMethod], device: torch.device, matrix: QuantisedMatrix, bias: torch.Tensor | None
) -> LinearMethod:
    return method(matrix.to(device), bias)


def _row_bytes(matrix: QuantisedMatrix) -> int:
    return matrix.numel() + 4 * matrix.shape[0]


def _is_plain(matrix: QuantisedMatrix) -> bool:
    """One scale an output, and nothing else."""
    return matrix.zeros is None and matrix.order is None and matrix.group == matrix.shape[1]


def _is_int8(matrix: QuantisedMatrix) -> bool:
    return _is_plain(matrix) and matrix.codes.dtype == torch.int8 and matrix.activations == "int8"


def _is_fp8(matrix: QuantisedMatrix) -> bool:
    aligned = all(size % ALIGNED == 0 for size in matrix.shape)
    return _is_plain(matrix) and matrix.codes.dtype == FP8 and matrix.activations == "fp8" and aligned


class RowsMethod:
    """A matrix with one scale an output, for activations that are rounded to the same dtype by row: W8A8."""

    def __init__(self, matrix: QuantisedMatrix, bias: torch.Tensor | None):
        self.out_features, self.in_features = matrix.shape
        self._codes, self._bias = matrix.codes.contiguous(), bias
        self._scales = matrix.scales[:, 0].contiguous()
        self.nbytes = _bytes_of(self._codes, self._scales, bias)

    def dequantised(self) -> torch.Tensor:
        return self._codes.float() * self._scales[:, None]


class Int8Method(RowsMethod):
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return int8_product(x, self._codes, self._scales, self._bias)


class Fp8Method(RowsMethod):
    def apply(self, x: torch.Tensor) -> torch.Tensor:
        rounded, steps = round_rows(x, FP8)
        # Products by row are rounded to bfloat16, whatever else is asked for.
        product = torch._scaled_mm(
            rounded, self._codes.t(), scale_a=steps, scale_b=self._scales[None, :], out_dtype=torch.bfloat16
        )
        product = product.to(x.dtype)
        return product if self._bias is None else product.add_(self._bias)


def _has_few_bits(matrix: QuantisedMatrix) -> bool:
    integers = matrix.codes.dtype in (torch.uint8, torch.int8)
    floats = matrix.codes.dtype == FP8 and matrix.zeros is None  # e2m1
    return matrix.bits <= 4 and (integers or floats) and unit_of(matrix.shape[1], matrix.group, True) is not None


def _has_bytes(matrix: QuantisedMatrix) -> bool:
    fits = unit_of(matrix.shape[1], matrix.group, False) is not None
    return fits and matrix.bits <= 8 and matrix.codes.dtype in (torch.uint8, torch.int8)


def _has_floats(matrix: QuantisedMatrix) -> bool:
    """FP8 with scales of blocks; activations keep their dtype."""
    fits = unit_of(matrix.shape[1], matrix.group, False) is not None
    return fits and matrix.bits == 8 and matrix.codes.dtype == FP8


def group_bytes(matrix: QuantisedMatrix) -> int:
    outputs, inputs = matrix.shape
    codes = outputs * inputs // (2 if _has_few_bits(matrix) else 1)
    tables = 4 * matrix.scales.numel() * (1 if matrix.zeros is None else 2)
    return codes + tables + (0 if matrix.order is None else 4 * inputs)


class GroupsMethod:
    """A matrix with scales of groups; activations keep their dtype: W4A16 and W8A16."""

    def __init__(self, matrix: QuantisedMatrix, bias: torch.Tensor | None):
        self.out_features, self.in_features = matrix.shape
        packed = _has_few_bits(matrix)
        codes, scales, zeros = matrix.codes, matrix.scales, matrix.zeros
        zero, e2m1 = 0.0, codes.dtype == FP8 and packed
        if e2m1:
            codes, scales = _e2m1_codes(codes), scales / 2  # the kernel makes whole numbers of the codes
        elif codes.dtype == torch.int8:
            zero = float(1 << matrix.bits - 1)
            codes = (codes.to(torch.int16) + int(zero)).to(torch.uint8)
            zeros = None if zeros is None else zeros + zero
        unit = unit_of(self.in_features, matrix.group, packed)
        self._layout = Codes(matrix.group, unit, packed, e2m1, zero)
        self._codes = pack(codes, unit) if packed else codes.contiguous()
        self._scales = scales.t().contiguous()
        self._zeros = None if zeros is None else zeros.t().contiguous()
        self._order = None if matrix.order is None else matrix.order.to(torch.int32)
        self._bias = bias
        self.nbytes = _bytes_of(self._codes, self._scales, self._zeros, self._order, bias)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return quantised_product(x, self._codes, self._scales, self._zeros, self._order, self._bias, self._layout)

    def dequantised(self) -> torch.Tensor:
        layout = self._layout
        codes = unpack(self._codes, layout.unit) if layout.packed else self._codes
        if layout.e2m1:
            codes = E2M1[codes.int()].to(codes.device) * 2
        zeros = layout.zero if self._zeros is None else self._zeros.t()[:, :, None]
        groups = (codes.float().unflatten(1, (-1, layout.group)) - zeros) * self._scales.t()[:, :, None]
        weight = groups.flatten(1)
        return weight if self._order is None else torch.empty_like(weight).index_copy_(1, self._order.long(), weight)


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
E2M1 = torch.cat((E2M1, -E2M1))  # by code


def _e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """Floats that e2m1 holds → their codes, uint8."""
    values = values.float()
    sizes = torch.bucketize(values.abs(), E2M1[:8].to(values.device))
    return (sizes + 8 * values.signbit()).to(torch.uint8)


def _bytes_of(*tensors: torch.Tensor | None) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
