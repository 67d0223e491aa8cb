"""Paged attention for GPUs: one kernel for prompts, decodes, mixed batches and verification.

The query heads that share a KV head are packed with the new tokens of a sequence into the rows of one tile, so that
every key and value is read once for all of them (grouped queries: Ainslie et al., 2023). The softmax is online
(Milakov and Gimelshein, 2018; Dao et al., 2022), in base 2. A long context is cut into segments whose results are put
together by their log-sum-exps (Flash-Decoding, 2023); who computes what was decided on the device: see attention_plan.

A row's result depends on the other sequences of its step only through the number of segments that its own is cut into:
the sums are the same, in another order.
"""

import triton
import triton.language as tl

from sojourn.engine.compute.triton.attention_segments import UNSEEN, columns_of, combine, with_sink
from sojourn.engine.compute.triton.kv_formats import FP8, INT4, INT8, load_int4

ITEM_FIELDS = tl.constexpr(5)  # of a work item: sequence, block of rows, segment, segments of the block, partial result
VALUE_FACTOR = tl.constexpr(256.0)  # keeps probability * scale of an 8-bit value in float16's normal range


@triton.jit
def _attend_tiles(
    acc,
    total,
    peak,
    query,
    query_rest,
    positions,
    row_slopes,
    keys,
    values,
    key_scales,
    value_scales,
    table,
    head,
    begin,
    end,
    key_begin,
    key_end,
    gap,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SLOPED: tl.constexpr,
    LATENT: tl.constexpr,
    FORMAT: tl.constexpr,
    WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The tiles of keys from position `begin` to `end`, which leave `gap` positions out behind those of sink tokens.
    Without MASKED, every row sees every key of them. No row sees a key before `key_begin` that is no sink."""
    eight_bit: tl.constexpr = (FORMAT == FP8) | (FORMAT == INT8)
    main = tl.arange(0, MAIN)
    rest = VALUE_DIM + tl.arange(0, REST if REST > 0 else 1)
    lanes = tl.arange(0, BLOCK_N)
    # Read a tile ahead: keys and values wait for no other load, so as many as there are stages are on their way.
    blocks = _blocks(table, _position(begin, gap, SINK_TOKENS, BLOCK_N), lanes, key_end, BLOCK_N, BLOCK_SIZE)
    for tile in range(begin, end, BLOCK_N):
        start = _position(tile, gap, SINK_TOKENS, BLOCK_N)
        places = start + lanes
        if MASKED:
            live = places < key_end
            if WINDOW > 0:  # what stands before may be another sequence's by now, and no number
                live = live & ((places >= key_begin) | (places < SINK_TOKENS))
        if WIDE:
            blocks = blocks.to(tl.int64)
        if BLOCK_N % BLOCK_SIZE == 0:
            within = lanes % BLOCK_SIZE
        elif BLOCK_SIZE % BLOCK_N == 0:
            within = start % BLOCK_SIZE + lanes
        else:
            within = places % BLOCK_SIZE
        offsets = blocks * (BLOCK_SIZE * NUM_KV_HEADS) + within * TOKEN_STRIDE + head * HEAD_STRIDE
        ahead = _position(tile + BLOCK_N, gap, SINK_TOKENS, BLOCK_N)
        blocks = _blocks(table, ahead, lanes, key_end, BLOCK_N, BLOCK_SIZE)
        key_rows = keys + offsets[:, None] * HEAD_DIM
        if MASKED and MAIN == VALUE_DIM:
            wanted = live[:, None]
        elif MASKED:
            wanted = live[:, None] & (main < VALUE_DIM)[None, :]
        elif MAIN == VALUE_DIM:
            wanted = None
        else:
            wanted = (main < VALUE_DIM)[None, :]
        if FORMAT == INT4:
            present = live if MASKED else lanes >= 0
            key = load_int4(keys, key_scales, offsets, present, HEAD_DIM, MAIN // 2).to(query.dtype)
        else:
            key = _load(key_rows + main[None, :], wanted)
        if eight_bit:
            key = key.to(tl.float16)
        logits = tl.dot(query, tl.trans(key), input_precision="ieee")
        if REST > 0:
            wanted_rest = (rest < HEAD_DIM)[None, :]
            if MASKED:
                wanted_rest = wanted_rest & live[:, None]
            key_rest = _load(key_rows + rest[None, :], wanted_rest)
            if eight_bit:
                key_rest = key_rest.to(tl.float16)
            logits = tl.dot(query_rest, tl.trans(key_rest), logits, input_precision="ieee")
        if eight_bit:
            logits = logits * _load(key_scales + offsets, live if MASKED else None)[None, :]
        if SOFT_CAP > 0:  # tanh z = 1 - 2 / (e^2z + 1)
            logits = SOFT_CAP - (2 * SOFT_CAP) / (tl.exp(logits * (2 / SOFT_CAP)) + 1.0)
        if SLOPED:
            logits += row_slopes[:, None] * (places[None, :] - positions[:, None]).to(tl.float32)
        if MASKED:
            seen = places[None, :] <= positions[:, None]
            if WINDOW > 0:
                seen = seen & ((places[None, :] > positions[:, None] - WINDOW) | (places < SINK_TOKENS)[None, :])
            logits = tl.where(seen, logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1) * scale_log2)
        shares = tl.exp2(logits * scale_log2 - new_peak[:, None])  # one instruction before the exponential
        fading = tl.exp2(peak - new_peak)
        total = total * fading + tl.sum(shares, 1)
        peak = new_peak
        acc = acc * fading[:, None]
        if LATENT:
            value = key
        else:
            if FORMAT == INT4:
                value = load_int4(values, value_scales, offsets, present, HEAD_DIM, MAIN // 2).to(query.dtype)
            else:
                value = _load(values + offsets[:, None] * HEAD_DIM + main[None, :], wanted)
            if eight_bit:
                value = value.to(tl.float16)
        if eight_bit:
            shares = shares * (_load(value_scales + offsets, live if MASKED else None) * VALUE_FACTOR)[None, :]
        acc = tl.dot(shares.to(value.dtype), value, acc, input_precision="ieee")
    return acc, total, peak


@triton.jit
def _position(tile, gap, SINK_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first position of a tile: behind those that hold sink tokens, some are left out."""
    if SINK_TOKENS > 0:
        return tile + tl.where(tile >= (SINK_TOKENS + BLOCK_N - 1) // BLOCK_N * BLOCK_N, gap, 0)
    else:
        return tile


@triton.jit
def _blocks(table, start, lanes, key_end, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The block of each key of the tile from position `start`: one number if the tile lies within a block."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(table + start // BLOCK_SIZE, mask=start < key_end, other=0)
    elif BLOCK_N % BLOCK_SIZE == 0:
        return tl.load(table + start // BLOCK_SIZE + lanes // BLOCK_SIZE, mask=start + lanes < key_end, other=0)
    else:
        return tl.load(table + (start + lanes) // BLOCK_SIZE, mask=start + lanes < key_end, other=0)


@triton.jit
def _load(pointers, wanted):
    if wanted is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=wanted, other=0.0)


@triton.jit(
    do_not_specialize=["table_stride"],
    do_not_specialize_on_alignment=["block_tables", "table_rows", "query_start", "contexts"],
)
def attend_kernel(
    query,
    keys,
    values,
    key_scales,
    value_scales,
    slopes,
    sinks,
    output,
    partial_output,
    partial_lse,
    arrivals,
    block_tables,
    table_rows,
    query_start,
    contexts,
    items,
    scale_log2,
    query_token_stride,
    query_head_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINK_TOKENS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SLOPED: tl.constexpr,
    LATENT: tl.constexpr,
    FORMAT: tl.constexpr,
    WIDE: tl.constexpr,
    TWO_LOOPS: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENTS: tl.constexpr,
):
    """One work item of one KV head a program; grid (num_items * NUM_KV_HEADS,).

    query [num_tokens, num_heads, HEAD_DIM]; keys, values [num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM], whose
    TOKEN_STRIDE and HEAD_STRIDE count vectors, in any FORMAT; scales in the order of the vectors, where it has them;
    slopes [num_heads] float32, over the scale, read if SLOPED; sinks [num_heads], logits without a value, or None;
    output [num_tokens, num_heads, VALUE_DIM]; partial_output [*, NUM_KV_HEADS, BLOCK_M, MAIN] and partial_lse [*,
    NUM_KV_HEADS, BLOCK_M] float32; arrivals [*, NUM_KV_HEADS] int32, 0 before and after; block_tables [*,
    table_stride], table_rows [num_sequences], or None where row i is sequence i's, query_start [num_sequences + 1],
    contexts [num_sequences] and items [num_items, ITEM_FIELDS] int32. A head's vector is cut into MAIN (VALUE_DIM,
    padded) and REST (what keys have beyond it, padded) dimensions; LATENT values are the first part of the keys.
    scale_log2 is the scale of the logits times log2(e). SOFT_CAP is over the scale, 0 for none. With a WINDOW,
    SINK_TOKENS first keys are seen from everywhere. WIDE is needed from 2**31 elements of keys on.

    The program that computes the last segment of a block puts all of them together, ROWS rows and SEGMENTS segments at
    once, in the order of the segments: the sum does not depend on which program that is.
    """
    eight_bit: tl.constexpr = (FORMAT == FP8) | (FORMAT == INT8)
    program = tl.program_id(0)
    head = program % NUM_KV_HEADS
    item = items + (program // NUM_KV_HEADS) * ITEM_FIELDS
    sequence = tl.load(item)
    if sequence < 0:
        return
    block = tl.load(item + 1)
    segment = tl.load(item + 2)
    num_segments = tl.load(item + 3)
    first = tl.load(query_start + sequence)
    num_new = tl.load(query_start + sequence + 1) - first
    past = tl.load(contexts + sequence) - num_new  # below 0 in a padding row, which sees nothing

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = rows // GROUP
    heads = head * GROUP + rows % GROUP
    is_query = tokens < num_new
    positions = past + tokens
    first_position = past + block * BLOCK_M // GROUP
    key_end = past + tl.minimum((block * BLOCK_M + BLOCK_M - 1) // GROUP, num_new - 1) + 1
    tile_begin = 0
    if WINDOW > 0:
        tile_begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N
    tile_end = tl.cdiv(key_end, BLOCK_N)
    gap = 0
    if SINK_TOKENS > 0:
        left_out = tl.maximum(tile_begin - (SINK_TOKENS + BLOCK_N - 1) // BLOCK_N, 0)
        gap = left_out * BLOCK_N
        tile_begin = 0
        tile_end -= left_out
    share = tl.cdiv(tile_end - tile_begin, num_segments)
    tile_begin += segment * share
    tile_end = tl.minimum(tile_end, tile_begin + share)

    main = tl.arange(0, MAIN)
    query_rows = (
        query + (first + tokens).to(tl.int64)[:, None] * query_token_stride + heads[:, None] * query_head_stride
    )
    columns = columns_of(main, HEAD_DIM, FORMAT)
    packed = tl.load(query_rows + columns[None, :], mask=is_query[:, None] & (columns < VALUE_DIM)[None, :], other=0.0)
    if eight_bit:
        packed = packed.to(tl.float16)
    packed_rest = packed
    if REST > 0:
        rest = VALUE_DIM + tl.arange(0, REST)
        packed_rest = tl.load(
            query_rows + rest[None, :], mask=is_query[:, None] & (rest < HEAD_DIM)[None, :], other=0.0
        )
        if eight_bit:
            packed_rest = packed_rest.to(tl.float16)
    row_slopes = positions.to(tl.float32)
    if SLOPED:
        row_slopes = tl.load(slopes + heads, mask=is_query, other=0.0)

    acc = tl.zeros([BLOCK_M, MAIN], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], UNSEEN, tl.float32)
    row = sequence
    if table_rows is not None:
        row = tl.load(table_rows + sequence)
    table = block_tables + row.to(tl.int64) * table_stride
    begin = tile_begin * BLOCK_N
    end = tile_end * BLOCK_N
    key_begin = first_position - WINDOW + 1
    if TWO_LOOPS:
        # Up to here the first row, and so every row, sees all keys.
        clear = tl.minimum(tl.maximum((first_position + 1) // BLOCK_N * BLOCK_N, begin), end)
        acc, total, peak = _attend_tiles(
            acc, total, peak, packed, packed_rest, positions, row_slopes, keys, values, key_scales, value_scales, table,
            head, begin, clear, key_begin, key_end, gap, scale_log2, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, MAIN, REST,
            BLOCK_N, BLOCK_SIZE, TOKEN_STRIDE, HEAD_STRIDE, WINDOW, SINK_TOKENS, SOFT_CAP, SLOPED, LATENT, FORMAT,
            WIDE, False,
        )  # fmt: skip
        begin = clear
    acc, total, peak = _attend_tiles(
        acc, total, peak, packed, packed_rest, positions, row_slopes, keys, values, key_scales, value_scales, table,
        head, begin, end, key_begin, key_end, gap, scale_log2, NUM_KV_HEADS, HEAD_DIM, VALUE_DIM, MAIN, REST,
        BLOCK_N, BLOCK_SIZE, TOKEN_STRIDE, HEAD_STRIDE, WINDOW, SINK_TOKENS, SOFT_CAP, SLOPED, LATENT, FORMAT,
        WIDE, True,
    )  # fmt: skip

    normaliser = tl.where(total == 0.0, 1.0, total)
    if eight_bit:
        acc = acc * (1.0 / VALUE_FACTOR)
    if num_segments == 1:
        if sinks is not None:  # of several segments, who puts them together adds its share
            normaliser = with_sink(normaliser, peak, sinks, heads, is_query)
        acc = acc / normaliser[:, None]
        num_heads = NUM_KV_HEADS * GROUP
        targets = ((first + tokens).to(tl.int64) * num_heads + heads) * VALUE_DIM
        stored = is_query[:, None] & (columns < VALUE_DIM)[None, :]
        tl.store(output + targets[:, None] + columns[None, :], acc.to(output.dtype.element_ty), mask=stored)
    else:
        acc = acc / normaliser[:, None]
        slot = tl.load(item + 4)
        places = ((slot + segment) * NUM_KV_HEADS + head).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(partial_output + places[:, None] * MAIN + main[None, :], acc, mask=is_query[:, None])
        lse = tl.where(total == 0.0, float("-inf"), peak + tl.log2(normaliser))
        tl.store(partial_lse + places, lse, mask=is_query)
        tl.debug_barrier()  # all threads have written before one of them says so
        arrival = arrivals + slot * NUM_KV_HEADS + head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == num_segments - 1:
            tl.store(arrival, 0)  # for the next launch
            combine(
                partial_output, partial_lse, sinks, output, slot, head, num_segments, first, num_new, block,
                NUM_KV_HEADS, GROUP, VALUE_DIM, MAIN, BLOCK_M, ROWS, SEGMENTS, FORMAT,
            )  # fmt: skip
