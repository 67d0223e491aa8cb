"""Segments of attention, which several programs computed, put together; and what that shares with their kernel."""

import math

import triton
import triton.language as tl

from sojourn.engine.compute.triton.kv_formats import INT4

UNSEEN = tl.constexpr(-1e30)  # a row's maximum before its first key: finite, so that no difference is NaN
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def columns_of(main, HEAD_DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Which numbers of a vector a tile holds: those of int4 come from both halves in turns."""
    if FORMAT == INT4:
        return tl.where(main // 2 < HEAD_DIM // 2, main % 2 * (HEAD_DIM // 2) + main // 2, HEAD_DIM)
    else:
        return main


@triton.jit
def with_sink(total, peak, sinks, heads, wanted):
    """The sum of a row's weights and of its head's sink, both relative to the row's peak."""
    sink = tl.load(sinks + heads, mask=wanted, other=float("-inf")).to(tl.float32) * LOG2_E
    return total + tl.exp2(sink - peak)


@triton.jit
def combine(
    partial_output,
    partial_lse,
    sinks,
    output,
    slot,
    head,
    num_segments,
    first,
    num_new,
    block,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Puts the segments of a block of rows together by their log-sum-exps. Other multiprocessors wrote them: loads pass
    by the cache of this one."""
    main = tl.arange(0, MAIN)
    columns = columns_of(main, VALUE_DIM, FORMAT)
    live_rows = tl.minimum(num_new * GROUP - block * BLOCK_M, BLOCK_M)
    for begin in range(0, live_rows, ROWS):
        local = begin + tl.arange(0, ROWS)
        is_query = local < live_rows
        acc = tl.zeros([ROWS, MAIN], tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        peak = tl.full([ROWS], UNSEEN, tl.float32)
        for start in range(0, num_segments, SEGMENTS):
            segments = start + tl.arange(0, SEGMENTS)
            wanted = (segments < num_segments)[:, None] & is_query[None, :]
            places = ((slot + segments) * NUM_KV_HEADS + head).to(tl.int64)[:, None] * BLOCK_M + local[None, :]
            lse = tl.load(partial_lse + places, mask=wanted, other=float("-inf"), cache_modifier=".cg")
            cells = places[:, :, None] * MAIN + main[None, None, :]
            parts = tl.load(partial_output + cells, mask=wanted[:, :, None], other=0.0, cache_modifier=".cg")
            new_peak = tl.maximum(peak, tl.max(lse, 0))
            shares = tl.exp2(lse - new_peak[None, :])
            fading = tl.exp2(peak - new_peak)
            total = total * fading + tl.sum(shares, 0)
            acc = acc * fading[:, None] + tl.sum(parts * shares[:, :, None], 0)
            peak = new_peak
        rows = block * BLOCK_M + local
        total = tl.where(total == 0.0, 1.0, total)
        if sinks is not None:
            total = with_sink(total, peak, sinks, head * GROUP + rows % GROUP, is_query)
        acc = acc / total[:, None]
        tokens = (first + rows // GROUP).to(tl.int64)
        targets = (tokens * (NUM_KV_HEADS * GROUP) + head * GROUP + rows % GROUP) * VALUE_DIM
        stored = is_query[:, None] & (columns < VALUE_DIM)[None, :]
        tl.store(output + targets[:, None] + columns[None, :], acc.to(output.dtype.element_ty), mask=stored)
