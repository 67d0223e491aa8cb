"""Quantised matrices of up to 8 bits, with scales of groups, for a CPU: the order in which cpp/gemm_groups.cpp reads
them. The kernel rounds activations to int8 by token and group."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sojourn.engine.compute.cpp.matrices import LARGEST_INNER, PANEL, CppWeight
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix

STEP = 4  # inputs that one instruction multiplies
HALF_PANEL = (2, 2, 16)  # of 4 bits: two vectors of bytes, each the low and the high halves of 16 channels


def fits(matrix: QuantisedMatrix) -> bool:
    """Whether the kernel reads such a matrix: integer codes of up to 8 bits, whole steps in each group."""
    whole = matrix.group % STEP == 0 or matrix.group == matrix.shape[1]
    integers = matrix.codes.dtype in (torch.uint8, torch.int8) and matrix.bits <= 8
    return whole and integers and matrix.group <= LARGEST_INNER and matrix.activations in (None, "int8")


def nbytes(matrix: QuantisedMatrix) -> int:
    """At most: scales and zeros take half as much where float16 holds them exactly."""
    outputs, inputs = matrix.shape
    channels = outputs + -outputs % PANEL
    scales = 4 * matrix.scales.shape[1] * (1 if matrix.zeros is None else 2)
    order = 0 if matrix.order is None else 4 * inputs
    codes = _padded_inputs(matrix) if matrix.bits > 4 else _padded_inputs(matrix) // 2
    return channels * (codes + scales) + order


def pack(kernel: Callable[..., None], matrix: QuantisedMatrix, bias: torch.Tensor | None) -> CppWeight:
    """Panels of codes [out / 64, in / 4, 64, 4], of 4 bits [out / 64, in / 4, 2, 16, 4], two a byte; scales, zeros
    [out / 64, groups, 64]."""
    outputs, inputs = matrix.shape
    bits, padding = 4 if matrix.bits <= 4 else 8, _padded_inputs(matrix) - inputs
    codes, zeros = _unsigned(matrix)
    codes = F.pad(codes, (0, padding, 0, -outputs % PANEL))
    panels = codes.unflatten(1, (-1, STEP)).unflatten(0, (-1, PANEL)).transpose(1, 2)
    if bits == 4:
        halves = panels.unflatten(2, HALF_PANEL)
        panels = halves[:, :, :, 0] | (halves[:, :, :, 1] << 4)
    zero = zeros if isinstance(zeros, int) else 0
    tables = [matrix.scales] if isinstance(zeros, int) else [matrix.scales, zeros]
    dtype = torch.float16 if all(torch.equal(table.half().float(), table) for table in tables) else torch.float32
    tables = [_channels_last(table).to(dtype) for table in tables] + [None]
    order = None if matrix.order is None else F.pad(matrix.order.to(torch.int32), (0, padding))
    form = torch.tensor([matrix.group + padding, bits, int(dtype == torch.float16), zero])
    return CppWeight(kernel, matrix.shape, _unpacked, panels.contiguous(), *tables[:2], order, bias, form)


def _padded_inputs(matrix: QuantisedMatrix) -> int:
    """A group that is the whole channel may end within a step."""
    return matrix.shape[1] + (-matrix.group % STEP)


def _unsigned(matrix: QuantisedMatrix) -> tuple[torch.Tensor, torch.Tensor | int]:
    """Codes as uint8, and what is taken off them: a number where it is the same for all groups."""
    codes, zeros, shift = matrix.codes, matrix.zeros, 0
    if codes.dtype == torch.int8:
        shift = 1 << (max(matrix.bits, 2) - 1)
        codes = (codes.to(torch.int16) + shift).to(torch.uint8)
    if zeros is None:
        return codes, shift
    zeros = zeros + shift
    first = zeros.flatten()[0].item()
    return codes, int(first) if first == int(first) and bool((zeros == first).all()) else zeros


def _channels_last(table: torch.Tensor) -> torch.Tensor:
    """[out, groups] → [out / 64, groups, 64]."""
    return F.pad(table, (0, 0, 0, -len(table) % PANEL)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()


def _unpacked(
    panels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None,
    bias: torch.Tensor | None, form: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    group, bits, _, zero = form.tolist()
    if bits == 4:
        panels = torch.stack((panels & 15, panels >> 4), 3).flatten(2, 4)
    weight = panels.transpose(1, 2).flatten(2).flatten(0, 1).float().unflatten(1, (-1, group))

    def by_group(table: torch.Tensor) -> torch.Tensor:
        return table.float().transpose(1, 2).flatten(0, 1)[:, :, None]

    weight = ((weight - (zero if zeros is None else by_group(zeros))) * by_group(scales)).flatten(1)
    if order is None:
        return weight
    inputs = int(order.max()) + 1  # without padding
    return torch.empty_like(weight[:, :inputs]).index_copy_(1, order[:inputs].long(), weight[:, :inputs])
