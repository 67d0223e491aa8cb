"""Low-rank deltas of several adapters: shrink to the rank, then expand and add, one launch each for all of a step.

A program has one tile: neighbouring tokens with the same adapter. The table of tiles is read on the device, so a
captured graph serves other adapters at each replay; a tile without an adapter ends at once.
"""

import torch
import triton
import triton.language as tl

RANK_BLOCK = 32  # of the columns of h in one program of shrink
DEPTH = 64
COLUMNS = 64  # of y in one program of expand


@triton.jit
def shrink_kernel(
    x_pointer, a_pointer, scales_pointer, h_pointer, tiles_pointer, x_stride, in_features,
    WIDTH: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, RANK_BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """h [num_tokens, WIDTH] float32 = scale * x @ A.T, of A [slots, WIDTH, in_features], whose rows are RANK for each
    part; grid (tiles, WIDTH / RANK_BLOCK)."""
    tile = tiles_pointer + tl.program_id(0) * 3
    slot = tl.load(tile)
    if slot >= 0:
        begin, count = tl.load(tile + 1), tl.load(tile + 2)
        rows = tl.arange(0, ROWS)
        inside = rows < count
        columns = tl.program_id(1) * RANK_BLOCK + tl.arange(0, RANK_BLOCK)
        depth = tl.arange(0, DEPTH)
        x = x_pointer + (begin + rows)[:, None].to(tl.int64) * x_stride + depth[None, :]
        a = a_pointer + (slot.to(tl.int64) * WIDTH + columns[None, :]) * in_features + depth[:, None]
        total = tl.zeros((ROWS, RANK_BLOCK), tl.float32)
        for start in range(0, in_features, DEPTH):
            left = depth < in_features - start
            part = tl.load(x + start, mask=inside[:, None] & left[None, :], other=0.0)
            total = tl.dot(part, tl.load(a + start, mask=left[:, None], other=0.0), total)
        scale = tl.load(scales_pointer + slot * (WIDTH // RANK) + columns // RANK)
        out = h_pointer + (begin + rows)[:, None].to(tl.int64) * WIDTH + columns[None, :]
        tl.store(out, total * scale[None, :], mask=inside[:, None])


@triton.jit
def expand_kernel(
    h_pointer, b_pointer, y_pointer, tiles_pointer, blocks_pointer, y_stride, out_features,
    WIDTH: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RANK_BLOCK: tl.constexpr,
):  # fmt: skip
    """y [num_tokens, out_features] += h @ B.T, of B [slots, out_features, RANK]; grid (tiles, column blocks). A block
    [begin, end, part] has the columns of one part."""
    tile, block = tiles_pointer + tl.program_id(0) * 3, blocks_pointer + tl.program_id(1) * 3
    slot = tl.load(tile)
    if slot >= 0:
        begin, count = tl.load(tile + 1), tl.load(tile + 2)
        rows = tl.arange(0, ROWS)
        inside = rows < count
        columns = tl.load(block) + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (columns < tl.load(block + 1))[None, :]
        ranks = tl.arange(0, RANK_BLOCK)
        h = h_pointer + (begin + rows)[:, None].to(tl.int64) * WIDTH + tl.load(block + 2) * RANK + ranks[None, :]
        b = b_pointer + (slot.to(tl.int64) * out_features + columns[None, :]) * RANK + ranks[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, RANK, RANK_BLOCK):
            weights = tl.load(b + start, mask=(columns < tl.load(block + 1))[None, :], other=0.0)
            part = tl.load(h + start, mask=inside[:, None], other=0.0)
            total = tl.dot(part.to(weights.dtype), weights, total)
        y = y_pointer + (begin + rows)[:, None].to(tl.int64) * y_stride + columns[None, :]
        before = tl.load(y, mask=mask, other=0.0)
        tl.store(y, (before.to(tl.float32) + total).to(before.dtype), mask=mask)


def add_lora(
    x: torch.Tensor,
    y: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    scales: torch.Tensor,
    tiles: torch.Tensor,
    blocks: torch.Tensor,
    rows: int,
) -> None:
    """Adds to y [num_tokens, out] the deltas of x [num_tokens, in].

    a [slots, parts * rank, in], b [slots, out, rank], scales [slots, parts] float32, tiles [n, 3] int32 (slot, begin,
    count up to `rows`), blocks [m, 3] int32 (begin, end, part). `rows` and the rank are powers of two from 16 on.
    """
    width, rank = a.shape[1], b.shape[2]
    assert x.stride(1) == 1 and y.stride(1) == 1, "rows of neighbours"
    h = torch.empty((len(x), width), dtype=torch.float32, device=x.device)
    step = min(RANK_BLOCK, rank)
    shrink_kernel[(len(tiles), width // step)](
        x, a, scales, h, tiles, x.stride(0), a.shape[2], WIDTH=width, RANK=rank, ROWS=rows, RANK_BLOCK=step,
        DEPTH=DEPTH, num_warps=4, num_stages=3,
    )  # fmt: skip
    expand_kernel[(len(tiles), len(blocks))](
        h, b, y, tiles, blocks, y.stride(0), y.shape[1], WIDTH=width, RANK=rank, ROWS=rows, COLUMNS=COLUMNS,
        RANK_BLOCK=step, num_warps=4, num_stages=2,
    )  # fmt: skip
