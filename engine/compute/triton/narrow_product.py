"""Activations of 8 bits: rows of int8 or FP8 with a scale each, and the product of int8 rows with int8 weights.

A row's scale is its own, so that a token's numbers do not depend on the tokens that it is computed with.
"""

import torch
import triton
import triton.language as tl

from sojourn.engine.compute.triton.experts import Tiles

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
BLOCK = 1024  # numbers of a row that one step reads, at most
PROGRAMS = 264  # two for each multiprocessor of a large GPU


@triton.jit
def round_rows_kernel(
    x_pointer, rounded_pointer, scales_pointer, x_stride, size, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):
    """rounded [num_rows, size] and scales [num_rows], x = rounded * scale; one program a row. A row that holds what is
    not finite has a scale of NaN."""
    row = tl.program_id(0).to(tl.int64)
    places = tl.arange(0, BLOCK)
    most = tl.zeros((BLOCK,), tl.float32)
    strange = tl.zeros((BLOCK,), tl.float32)  # 0, or NaN where something is not finite
    for begin in range(0, size, BLOCK):
        value = tl.load(x_pointer + row * x_stride + begin + places, mask=places < size - begin, other=0.0)
        value = value.to(tl.float32)
        most = tl.maximum(most, tl.abs(value))
        strange += tl.where(tl.abs(value) < float("inf"), 0.0, float("nan"))
    largest = tl.max(most, axis=0)
    finite = largest < float("inf")
    scale = tl.where(finite, largest, 0.0) / LARGEST
    inverse = tl.where(largest > 1e-30, LARGEST / tl.maximum(largest, 1e-30), 0.0)
    tl.store(scales_pointer + row, scale + tl.sum(strange, axis=0))
    for begin in range(0, size, BLOCK):
        inside = places < size - begin
        value = tl.load(x_pointer + row * x_stride + begin + places, mask=inside, other=0.0).to(tl.float32)
        scaled = tl.minimum(tl.maximum(tl.where(tl.abs(value) < float("inf"), value, 0.0) * inverse, -LARGEST), LARGEST)
        dtype = rounded_pointer.dtype.element_ty
        if dtype == tl.int8:
            scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: adding it rounds to a whole number
        tl.store(rounded_pointer + row * size + begin + places, scaled.to(dtype), mask=inside)


def round_rows(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_rows, size] → `dtype` (int8 or float8_e4m3fn) of the same shape, and float32 scales [num_rows, 1]."""
    rows, size = x.shape
    rounded = torch.empty((rows, size), dtype=dtype, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        x = x if x.stride(1) == 1 else x.contiguous()
        block = min(BLOCK, triton.next_power_of_2(size))
        round_rows_kernel[(rows,)](x, rounded, scales, x.stride(0), size, LARGEST=LARGEST[dtype], BLOCK=block)
    return rounded, scales


@triton.jit(do_not_specialize=["num_rows"])
def int8_product_kernel(
    x_pointer, x_scales_pointer, weight_pointer, scales_pointer, bias_pointer, out_pointer, num_rows, depth_size, size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out [num_rows, size] of int8 x [num_rows, depth_size] and int8 weight [size, depth_size], sums in int32; grid
    (size / COLUMNS, num_rows / ROWS)."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, column_inside = rows < num_rows, columns < size
    depth = tl.arange(0, DEPTH)
    x = x_pointer + rows[:, None].to(tl.int64) * depth_size + depth[None, :]
    weight = weight_pointer + columns[None, :].to(tl.int64) * depth_size + depth[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.int32)
    for begin in range(0, depth_size, DEPTH):
        depth_inside = depth < depth_size - begin
        part = tl.load(x + begin, mask=row_inside[:, None] & depth_inside[None, :], other=0)
        other = tl.load(weight + begin, mask=depth_inside[:, None] & column_inside[None, :], other=0)
        total = tl.dot(part, other, total, out_dtype=tl.int32)
    scales = tl.load(scales_pointer + columns, mask=column_inside, other=0.0)
    steps = tl.load(x_scales_pointer + rows, mask=row_inside, other=0.0)
    result = total.to(tl.float32) * (steps[:, None] * scales[None, :])
    if bias_pointer is not None:
        result += tl.load(bias_pointer + columns, mask=column_inside, other=0.0).to(tl.float32)[None, :]
    out = out_pointer + rows[:, None].to(tl.int64) * size + columns[None, :]
    tl.store(out, result.to(out_pointer.dtype.element_ty), mask=row_inside[:, None] & column_inside[None, :])


def tiles_for(rows: int, size: int) -> Tiles:
    """Few columns a program where there are few, so that all multiprocessors read."""
    if rows > 64:
        return Tiles(128, 128, 128, 8, 3)
    columns = min(64, max(16, triton.next_power_of_2(triton.cdiv(size, PROGRAMS))))
    return Tiles(max(16, triton.next_power_of_2(rows)), columns, 128, 4, 4)


def int8_product(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, tiles: Tiles | None = None
) -> torch.Tensor:
    """x [num_rows, in], weight [out, in] int8, scales [out] float32 → x, rounded to int8 by row, times the weight:
    [num_rows, out] in the dtype of x."""
    rows, size = len(x), len(weight)
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    rounded, steps = round_rows(x, torch.int8)
    tiles = tiles or tiles_for(rows, size)
    int8_product_kernel[(triton.cdiv(size, tiles.columns), triton.cdiv(rows, tiles.rows))](
        rounded, steps, weight, scales, bias, out, rows, x.shape[1], size,
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
