"""Kernels of a CPU for quantised matrices, in float32 arithmetic or with activations of 8 bits."""

from functools import partial

import torch

from sojourn.engine.compute.cpp.extension import Library, library
from sojourn.engine.compute.cpp.matrices import LARGEST_INNER, CppWeight, groups_kernel, int8_kernel
from sojourn.engine.compute.quantisation import cpu_groups
from sojourn.engine.compute.quantisation.kernels import Kernel
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.compute.weight_formats import pack_int8_codes


def cpu_kernels() -> tuple[Kernel, ...]:
    """Those that this machine's instructions allow, best first."""
    return () if (kernels := library()) is None else (*_int8(kernels), *_groups(kernels))


def _int8(kernels: Library) -> list[Kernel]:
    """W8A8: int8 weights with one scale an output, activations rounded by token. Fixed (static) activation scales are
    not used: rounding by token is never coarser."""
    if (multiply := int8_kernel(kernels)) is None:
        return []
    return [Kernel("int8", _is_w8a8, partial(_make_int8, multiply), _int8_bytes)]


def _is_w8a8(matrix: QuantisedMatrix) -> bool:
    plain = matrix.zeros is None and matrix.order is None and matrix.group == matrix.shape[1]
    narrow = matrix.codes.dtype == torch.int8 and matrix.activations == "int8"
    return plain and narrow and matrix.shape[1] <= LARGEST_INNER


def _make_int8(multiply, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> CppWeight:
    return pack_int8_codes(multiply, matrix.codes, matrix.scales[:, 0], bias)


def _int8_bytes(matrix: QuantisedMatrix) -> int:
    return matrix.numel() + 8 * matrix.shape[0]  # a scale and a sum an output


def _groups(kernels: Library) -> list[Kernel]:
    """Codes of up to 4 and up to 8 bits with scales of groups. Activations are rounded by token and group, also where
    the checkpoint would keep them: a product of integers is several times faster (docs/results/performance.md)."""
    if (multiply := groups_kernel(kernels)) is None:
        return []
    make = partial(cpu_groups.pack, multiply)
    return [
        Kernel("int4", lambda matrix: matrix.bits <= 4 and cpu_groups.fits(matrix), make, cpu_groups.nbytes),
        Kernel("int8", cpu_groups.fits, make, cpu_groups.nbytes),
    ]
