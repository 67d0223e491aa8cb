"""The gated half of a feed-forward part in one launch: act(x @ gate.T) * (x @ up.T), for the few rows of a decode step.

The library's product of so few rows is bound by the bytes of the weights, or by its launch; a kernel that also computes
the gate saves a launch and the round trip of both halves. With more rows the library's own product is faster.
"""

import torch
import triton
import triton.language as tl

from sojourn.engine.compute.triton.experts import Tiles
from sojourn.engine.compute.triton.gate import SILU, gated

ROWS = 256  # at most
FEW_ROWS = 64  # up to here the bytes of the weights are all that counts
MULTIPLICATIONS = 2**31  # with more rows: some microseconds of a GPU, as a launch takes
PROGRAMS = 264  # two for each multiprocessor of a large GPU


@triton.jit(do_not_specialize=["num_rows"])
def gated_product_kernel(
    x_pointer, weight_pointer, out_pointer, num_rows, x_stride, depth_size, size,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out [num_rows, size] of x [num_rows, depth_size] and weight [2 * size, depth_size]: first the gate's rows, then
    those of up; grid (size / COLUMNS, num_rows / ROWS)."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row_inside, column_inside = rows < num_rows, columns < size
    depth = tl.arange(0, DEPTH)
    x = x_pointer + rows[:, None].to(tl.int64) * x_stride + depth[None, :]
    gate_rows = weight_pointer + columns[None, :].to(tl.int64) * depth_size + depth[:, None]
    up_rows = weight_pointer + (size + columns)[None, :].to(tl.int64) * depth_size + depth[:, None]
    gate = tl.zeros((ROWS, COLUMNS), tl.float32)
    up = tl.zeros((ROWS, COLUMNS), tl.float32)
    for begin in range(0, depth_size, DEPTH):
        depth_inside = depth < depth_size - begin
        part = tl.load(x + begin, mask=row_inside[:, None] & depth_inside[None, :], other=0.0)
        mask = depth_inside[:, None] & column_inside[None, :]
        gate = tl.dot(part, tl.load(gate_rows + begin, mask=mask, other=0.0), gate)
        up = tl.dot(part, tl.load(up_rows + begin, mask=mask, other=0.0), up)
    # Rounded where torch rounds: behind each product and behind the gate.
    dtype = out_pointer.dtype.element_ty
    out = out_pointer + rows[:, None].to(tl.int64) * size + columns[None, :]
    tl.store(
        out, gated(gate.to(dtype), up.to(dtype), KIND).to(dtype), mask=row_inside[:, None] & column_inside[None, :]
    )


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel is expected to be faster than the library's product and a gate behind it."""
    rows = len(x)
    few = rows <= FEW_ROWS or (rows <= ROWS and rows * weight.numel() <= MULTIPLICATIONS)
    return few and x.dtype == weight.dtype and x.itemsize == 2


def tiles_for(rows: int, size: int) -> Tiles:
    """Few columns a program where there are few, so that all multiprocessors read."""
    if rows > 32:
        return Tiles(64, 64, 64, 4, 4)
    columns = min(64, max(16, triton.next_power_of_2(triton.cdiv(size, PROGRAMS))))
    return Tiles(16 if rows <= 16 else 32, columns, 128, 4, 4 if columns < 64 else 3)


def gated_product(
    x: torch.Tensor, weight: torch.Tensor, kind: int = SILU.value, tiles: Tiles | None = None
) -> torch.Tensor:
    """x [num_rows, depth_size] and weight [2 * size, depth_size], of 16 bits → [num_rows, size]."""
    (rows, depth_size), size = x.shape, len(weight) // 2
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    assert x.stride(1) == 1 and weight.is_contiguous(), "rows of neighbours"
    tiles = tiles or tiles_for(rows, size)
    gated_product_kernel[(triton.cdiv(size, tiles.columns), triton.cdiv(rows, tiles.rows))](
        x, weight, out, rows, x.stride(0), depth_size, size,
        KIND=kind, ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
