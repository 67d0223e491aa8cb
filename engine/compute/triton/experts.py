"""Mixture of experts as two grouped matrix products: the tokens of an expert are tiles of rows, and which expert a tile
belongs to is found on the device. No count is read by the host, so that a CUDA graph can hold it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from sojourn.engine.compute.triton.gate import SILU, gated


@dataclass(frozen=True, slots=True)
class Tiles:
    """Shape of one program's part of a product."""

    rows: int  # pairs of token and expert
    columns: int
    depth: int  # of the sum, a step
    num_warps: int
    num_stages: int


@triton.jit
def _tile(starts_pointer, tile, num_experts, ROWS: tl.constexpr, EXPERTS: tl.constexpr):
    """Which expert a tile belongs to, num_experts if none, and its first pair and the end of that expert's pairs.

    Experts follow each other, each with as many tiles as its pairs need.
    """
    expert = tl.arange(0, EXPERTS)
    inside = expert < num_experts
    begins = tl.load(starts_pointer + expert, mask=inside, other=0)
    ends = tl.load(starts_pointer + expert + 1, mask=inside, other=0)
    tiles = (ends - begins + ROWS - 1) // ROWS
    tiles_end = tl.cumsum(tiles, axis=0)
    mine = tl.sum((inside & (tiles_end <= tile)).to(tl.int32), axis=0)
    chosen = expert == mine
    first = tl.sum(tl.where(chosen, begins + (tile - (tiles_end - tiles)) * ROWS, 0), axis=0)
    return mine, first, tl.sum(tl.where(chosen, ends, 0), axis=0)


@triton.jit
def gate_up_kernel(
    x_pointer, order_pointer, starts_pointer, weight_pointer, bias_pointer, hidden_pointer,
    x_stride, num_chosen, num_experts, hidden_size, intermediate_size,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """hidden [pairs in the order of experts, intermediate_size] = the gate of each pair's token; bias [num_experts, 2 *
    intermediate_size], or None."""
    expert, first, end = _tile(starts_pointer, tl.program_id(0), num_experts, ROWS, EXPERTS)
    if expert < num_experts:
        pairs = first + tl.arange(0, ROWS)
        row_inside = pairs < end
        tokens = tl.load(order_pointer + pairs, mask=row_inside, other=0) // num_chosen
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        column_inside = columns < intermediate_size
        depth = tl.arange(0, DEPTH)
        x = x_pointer + tokens[:, None].to(tl.int64) * x_stride + depth[None, :]
        weight = weight_pointer + expert.to(tl.int64) * 2 * intermediate_size * hidden_size
        gate_rows = weight + columns[None, :].to(tl.int64) * hidden_size + depth[:, None]
        up_rows = weight + (intermediate_size + columns)[None, :].to(tl.int64) * hidden_size + depth[:, None]
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, hidden_size, DEPTH):
            depth_inside = depth < hidden_size - begin
            part = tl.load(x + begin, mask=row_inside[:, None] & depth_inside[None, :], other=0.0)
            mask = depth_inside[:, None] & column_inside[None, :]
            gate = tl.dot(part, tl.load(gate_rows + begin, mask=mask, other=0.0), gate, input_precision=PRECISION)
            up = tl.dot(part, tl.load(up_rows + begin, mask=mask, other=0.0), up, input_precision=PRECISION)
        if bias_pointer is not None:
            bias = bias_pointer + expert.to(tl.int64) * 2 * intermediate_size + columns
            gate += tl.load(bias, mask=column_inside, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + intermediate_size, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        # Rounded where torch rounds: behind each product and behind the gate.
        dtype = hidden_pointer.dtype.element_ty
        out = hidden_pointer + pairs[:, None].to(tl.int64) * intermediate_size + columns[None, :]
        tl.store(
            out, gated(gate.to(dtype), up.to(dtype), KIND).to(dtype), mask=row_inside[:, None] & column_inside[None, :]
        )


@triton.jit
def down_kernel(
    hidden_pointer, order_pointer, starts_pointer, weight_pointer, bias_pointer, factors_pointer, parts_pointer,
    num_experts, hidden_size, intermediate_size,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EXPERTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """parts [pairs in the order of tokens, hidden_size] = down(hidden) times the pair's weight; bias [num_experts,
    hidden_size], or None."""
    expert, first, end = _tile(starts_pointer, tl.program_id(0), num_experts, ROWS, EXPERTS)
    if expert < num_experts:
        pairs = first + tl.arange(0, ROWS)
        row_inside = pairs < end
        places = tl.load(order_pointer + pairs, mask=row_inside, other=0)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        column_inside = columns < hidden_size
        depth = tl.arange(0, DEPTH)
        hidden = hidden_pointer + pairs[:, None].to(tl.int64) * intermediate_size + depth[None, :]
        weight = weight_pointer + expert.to(tl.int64) * hidden_size * intermediate_size
        weight_rows = weight + columns[None, :].to(tl.int64) * intermediate_size + depth[:, None]
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for begin in range(0, intermediate_size, DEPTH):
            depth_inside = depth < intermediate_size - begin
            part = tl.load(hidden + begin, mask=row_inside[:, None] & depth_inside[None, :], other=0.0)
            mask = depth_inside[:, None] & column_inside[None, :]
            total = tl.dot(part, tl.load(weight_rows + begin, mask=mask, other=0.0), total, input_precision=PRECISION)
        if bias_pointer is not None:
            bias = bias_pointer + expert.to(tl.int64) * hidden_size + columns
            total += tl.load(bias, mask=column_inside, other=0.0).to(tl.float32)[None, :]
        dtype = parts_pointer.dtype.element_ty
        factors = tl.load(factors_pointer + places, mask=row_inside, other=0.0).to(dtype).to(tl.float32)
        weighted = total.to(dtype).to(tl.float32) * factors[:, None]
        out = parts_pointer + places[:, None].to(tl.int64) * hidden_size + columns[None, :]
        tl.store(out, weighted.to(dtype), mask=row_inside[:, None] & column_inside[None, :])


@triton.jit
def sum_kernel(
    parts_pointer, experts_pointer, out_pointer, num_chosen, num_experts, hidden_size,
    ELSEWHERE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds up a token's experts in the order of choice: the same digits every time. With ELSEWHERE those of other
    ranks have left no part."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden_size
    total = tl.zeros((BLOCK,), tl.float32)
    for chosen in range(num_chosen):
        part = parts_pointer + (token * num_chosen + chosen) * hidden_size + columns
        here = inside
        if ELSEWHERE:
            here = inside & (tl.load(experts_pointer + token * num_chosen + chosen) < num_experts)
        total += tl.load(part, mask=here, other=0.0).to(tl.float32)
    tl.store(out_pointer + token * hidden_size + columns, total.to(out_pointer.dtype.element_ty), mask=inside)


def tiles_for(num_pairs: int, num_experts: int, dtype: torch.dtype) -> Tiles:
    """Rows as the experts have on average, from the 16 that a matrix unit takes at least to 128."""
    rows = min(max(16, triton.next_power_of_2(triton.cdiv(num_pairs, num_experts))), 128)
    if dtype == torch.float32:
        return Tiles(min(rows, 64), 32, 32, 4, 2)
    if rows <= 32:  # few rows: the weights are read once, and as wide as may be
        return Tiles(rows, 64, 128, 4, 3)
    return Tiles(rows, 128, 64, 8, 3)


def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    tiles: Tiles | None = None,
    kind: int = SILU.value,
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    elsewhere: bool = False,
) -> torch.Tensor:
    """engine.compute.operations.reference.mixture. A token's numbers depend on the others only by the tiles'
    shape, which follows from the number of tokens."""
    (num_tokens, hidden_size), num_chosen = x.shape, experts.shape[1]
    num_experts, intermediate_size, num_pairs = len(gate_up), down.shape[2], experts.numel()
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    assert x.stride(1) == 1 and gate_up.is_contiguous() and down.is_contiguous(), "rows of neighbours"
    tiles = tiles or tiles_for(num_pairs, num_experts, x.dtype)
    by_expert, order = experts.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, dtype=by_expert.dtype, device=x.device)
    starts = torch.searchsorted(by_expert, bounds, out_int32=True)
    # Each expert that has pairs may leave one tile part empty; the rest of the grid finds nothing to do.
    num_tiles = num_pairs // tiles.rows + min(num_experts, num_pairs)
    hidden = torch.empty((num_pairs, intermediate_size), dtype=x.dtype, device=x.device)
    parts = torch.empty((num_pairs, hidden_size), dtype=x.dtype, device=x.device)
    shape = dict(
        ROWS=tiles.rows, COLUMNS=tiles.columns, DEPTH=tiles.depth, EXPERTS=triton.next_power_of_2(num_experts),
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32", num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    gate_up_kernel[(num_tiles, triton.cdiv(intermediate_size, tiles.columns))](
        x, order, starts, gate_up, None if biases is None else biases[0], hidden, x.stride(0), num_chosen, num_experts,
        hidden_size, intermediate_size, KIND=kind, **shape,
    )  # fmt: skip
    down_kernel[(num_tiles, triton.cdiv(hidden_size, tiles.columns))](
        hidden, order, starts, down, None if biases is None else biases[1], weights, parts, num_experts, hidden_size,
        intermediate_size, **shape,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(hidden_size))
    sum_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
        parts, experts, out, num_chosen, num_experts, hidden_size, ELSEWHERE=elsewhere, BLOCK=block
    )
    return out
