"""A product with quantised weights whose scales belong to groups of inputs. Weights become the activations' dtype in
registers: a decode step reads a quarter of the bytes of 16-bit weights, and activations keep their precision.

Codes of four bits lie two a byte: in each unit of inputs, the low halves are the first half of the unit, so that no
number has to change its place behind the load.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sojourn.engine.compute.triton.experts import Tiles

LARGEST_UNIT = 128  # inputs that one step of a sum takes
SMALLEST_DEPTH = 16  # of a matrix unit
PROGRAMS = 264  # two for each multiprocessor of a large GPU


@dataclass(frozen=True, slots=True)
class Codes:
    """How codes lie in memory, and what they mean."""

    group: int  # inputs of one scale
    unit: int  # inputs of one step
    packed: bool  # two codes a byte
    e2m1: bool = False  # floats of four bits: sign, two bits of exponent, one of fraction
    zero: float = 0.0  # of every group, where there is no table


@triton.jit
def _e2m1(code):
    """Twice the value of a float of four bits."""
    code = code.to(tl.int32)
    size = code & 7
    doubled = tl.where(size < 4, size, tl.where(size < 6, 2 * size - 4, 4 * size - 16))
    return tl.where(code >= 8, -doubled, doubled)


@triton.jit
def _weights(
    codes, inputs, columns, column_inside, scales_pointer, zeros_pointer, size,
    GROUP: tl.constexpr, UNIT: tl.constexpr, ZERO: tl.constexpr, E2M1: tl.constexpr,
):  # fmt: skip
    """[inputs, columns] float32; scales and zeros [groups, size]."""
    if E2M1:
        codes = _e2m1(codes)
    weights = codes.to(tl.float32)
    if GROUP >= UNIT:  # all inputs are of one group
        table = (tl.min(inputs) // GROUP) * size + columns[None, :]
        inside = column_inside[None, :]
    else:
        table = (inputs // GROUP)[:, None] * size + columns[None, :]
        inside = column_inside[None, :] & (inputs >= 0)[:, None]
    if zeros_pointer is not None:
        weights -= tl.load(zeros_pointer + table, mask=inside, other=0.0)
    elif ZERO != 0.0:
        weights -= ZERO
    return weights * tl.load(scales_pointer + table, mask=inside, other=0.0)


@triton.jit
def _activations(x, order_pointer, inputs, row_inside):
    """[rows, inputs] of rows that begin at `x`."""
    places = inputs if order_pointer is None else tl.load(order_pointer + inputs)
    return tl.load(x + places[None, :], mask=row_inside[:, None], other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def quantised_product_kernel(
    x_pointer, codes_pointer, scales_pointer, zeros_pointer, order_pointer, bias_pointer, out_pointer,
    num_rows, x_stride, depth_size, size,
    GROUP: tl.constexpr, UNIT: tl.constexpr, PACKED: tl.constexpr, E2M1: tl.constexpr, ZERO: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [num_rows, size] = x [num_rows, depth_size] @ weight.T + bias; grid (size / COLUMNS, num_rows / ROWS)."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, column_inside = rows < num_rows, columns < size
    DEPTH: tl.constexpr = UNIT // 2 if PACKED else UNIT
    depth = tl.arange(0, DEPTH)
    x = x_pointer + rows[:, None].to(tl.int64) * x_stride
    stored_size = depth_size // 2 if PACKED else depth_size
    codes = codes_pointer + columns[None, :].to(tl.int64) * stored_size + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for unit in range(0, depth_size // UNIT):
        stored = tl.load(codes + unit * DEPTH, mask=column_inside[None, :])  # what is outside is not stored
        inputs = unit * UNIT + depth
        part = _activations(x, order_pointer, inputs, row_inside)
        low = stored & 15 if PACKED else stored
        weights = _weights(low, inputs, columns, column_inside, scales_pointer, zeros_pointer, size, GROUP, UNIT,
                           ZERO, E2M1)  # fmt: skip
        total = tl.dot(part, weights.to(part.dtype), total, input_precision=PRECISION)
        if PACKED:
            inputs += DEPTH
            part = _activations(x, order_pointer, inputs, row_inside)
            weights = _weights(stored >> 4, inputs, columns, column_inside, scales_pointer, zeros_pointer, size, GROUP,
                               UNIT, ZERO, E2M1)  # fmt: skip
            total = tl.dot(part, weights.to(part.dtype), total, input_precision=PRECISION)
    if bias_pointer is not None:
        total += tl.load(bias_pointer + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    out = out_pointer + rows[:, None].to(tl.int64) * size + columns[None, :]
    tl.store(out, total.to(out_pointer.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


def unit_of(inputs: int, group: int, packed: bool) -> int | None:
    """Inputs of one step: a power of two that divides the inputs, and of which a group has, or is, a whole number. None
    where there is none that a matrix unit takes."""
    unit = min(LARGEST_UNIT, inputs & -inputs)
    while group % unit and unit % group:
        unit //= 2
    return unit if unit >= SMALLEST_DEPTH * (2 if packed else 1) else None


def pack(codes: torch.Tensor, unit: int) -> torch.Tensor:
    """Codes of four bits [out, in] uint8 → [out, in / 2], two a byte."""
    halves = codes.unflatten(1, (-1, 2, unit // 2))
    return (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1).contiguous()


def unpack(packed: torch.Tensor, unit: int) -> torch.Tensor:
    halves = packed.unflatten(1, (-1, unit // 2))
    return torch.stack((halves & 15, halves >> 4), 2).flatten(1)


def tiles_for(rows: int, size: int, dtype: torch.dtype) -> Tiles:
    """Few columns a program where there are few, so that all multiprocessors read; `depth` is the unit's."""
    if dtype == torch.float32:
        return Tiles(16 if rows <= 16 else 32, 32, 0, 4, 2)
    if rows > 64:
        return Tiles(128, 64, 0, 8, 3)
    columns = min(64, max(16, triton.next_power_of_2(triton.cdiv(size, PROGRAMS))))
    return Tiles(max(16, triton.next_power_of_2(rows)), columns, 0, 4, 3)


def quantised_product(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None,
    order: torch.Tensor | None, bias: torch.Tensor | None, layout: Codes, tiles: Tiles | None = None,
) -> torch.Tensor:  # fmt: skip
    """x [num_rows, in]; codes [out, in] uint8 or float8, or packed [out, in / 2]; scales and zeros [in / group, out]
    float32; order [in] int32 → [num_rows, out] in the dtype of x."""
    (rows, inputs), size = x.shape, len(codes)
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tiles = tiles or tiles_for(rows, size, x.dtype)
    quantised_product_kernel[(triton.cdiv(size, tiles.columns), triton.cdiv(rows, tiles.rows))](
        x, codes, scales, zeros, order, bias, out, rows, x.stride(0), inputs, size,
        GROUP=layout.group, UNIT=layout.unit, PACKED=layout.packed, E2M1=layout.e2m1, ZERO=layout.zero,
        ROWS=tiles.rows, COLUMNS=tiles.columns, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
