"""Who computes what of a step's attention: a list of work items, made on the device from the lengths that are there.

The host knows only bounds, and they are what grids and memory are sized by; so a captured graph serves any lengths. A
block of rows whose context is long for the whole step's work is cut into segments of like length.
"""

import triton
import triton.language as tl

from sojourn.engine.compute.triton.attention import ITEM_FIELDS

PLAN_FIELDS = tl.constexpr(3)  # of a sequence: first item, segments of each block, first partial result
# What a program takes, in quarters of the time of a tile: for each of its tiles, to begin, and to hand over a segment.
TILE, BEGIN, HAND_OVER = tl.constexpr(4), tl.constexpr(2), tl.constexpr(1)
MORE_WAVES = tl.constexpr(8)  # finer cuts that are tried, where the last wave would run half empty


@triton.jit
def _blocks_and_tiles(
    query_start,
    contexts,
    sequences,
    num_sequences,
    least_new,
    most_new,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Blocks of rows of each sequence, the tiles of keys of its longest block, and of all its blocks."""
    live = sequences < num_sequences
    begin = tl.load(query_start + sequences, mask=live, other=0)
    num_new = tl.load(query_start + sequences + 1, mask=live, other=0) - begin
    context = tl.load(contexts + sequences, mask=live, other=0)
    included = (num_new >= least_new) & (num_new <= most_new)
    blocks = tl.where(included, tl.cdiv(num_new * GROUP, BLOCK_M), 0)
    tiles = tl.cdiv(context, BLOCK_N)
    if WINDOW > 0:
        # The keys that the tokens of one block see, wherever their first tile begins.
        tiles = tl.minimum(tiles, tl.cdiv(WINDOW + (BLOCK_M - 1) // GROUP + 1, BLOCK_N) + 1)
    # The first of the new tokens see fewer keys than the last.
    mean = tl.maximum(tiles - num_new // (2 * BLOCK_N), tl.cdiv(tiles, 2))
    return blocks, tiles, blocks.to(tl.int64) * mean


@triton.jit
def _segments(tiles, length, SLACK: tl.constexpr):
    """Of each block. Rounded down, so that they are no more than were aimed at: one program more may be a wave more."""
    return tl.where((tiles > length * SLACK) & (tiles >= 2 * length), tiles // length, 1)


@triton.jit
def _cost(
    query_start,
    contexts,
    num_sequences,
    least_new,
    most_new,
    length,
    places,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SLACK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """What the step takes, and how many items more than blocks there are, with segments of `length` tiles.

    `places` programs run at once. Either all take as long as the longest and run in waves, or each begins where another
    ends, and the longest one runs alone at last: what is less.
    """
    lanes = tl.arange(0, CHUNK)
    programs = tl.zeros([CHUNK], tl.int32)
    extra = tl.zeros([CHUNK], tl.int32)
    longest = tl.zeros([CHUNK], tl.int32)
    in_all = tl.zeros([CHUNK], tl.int64)
    for start in range(0, num_sequences, CHUNK):
        blocks, tiles, tiles_of_all = _blocks_and_tiles(
            query_start, contexts, start + lanes, num_sequences, least_new, most_new, GROUP, BLOCK_M, BLOCK_N, WINDOW
        )
        segments = _segments(tiles, length, SLACK)
        own = tl.cdiv(tiles, segments) * TILE + BEGIN + tl.where(segments > 1, HAND_OVER, 0)
        programs += blocks * segments
        extra += blocks * (segments - 1)
        longest = tl.maximum(longest, tl.where(blocks > 0, own, 0))
        in_all += tiles_of_all * TILE + blocks * segments * (own - tl.cdiv(tiles, segments) * TILE)
    slowest = tl.max(longest, 0).to(tl.int64)
    waves = tl.cdiv(tl.sum(programs, 0) * NUM_KV_HEADS, places)
    one_by_one = tl.cdiv(tl.sum(in_all, 0) * NUM_KV_HEADS, places) + slowest
    return tl.minimum(waves * slowest, one_by_one), tl.sum(extra, 0)


@triton.jit(
    do_not_specialize=[
        "num_sequences", "least_new", "most_new", "target", "places", "least_tiles", "most_extra", "search_steps",
        "max_items",
    ],
    do_not_specialize_on_alignment=["query_start", "contexts"],
)  # fmt: skip
def plan_kernel(
    query_start,
    contexts,
    plan,
    items,
    num_sequences,
    least_new,
    most_new,
    target,
    places,
    least_tiles,
    most_extra,
    search_steps,
    max_items,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SLACK: tl.constexpr,
    RAGGED: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many segments each sequence's blocks are cut into, and the work items; grid (ceil(max_items / CHUNK),).

    Only sequences with least_new to most_new new tokens. A segment has as many tiles as make `target` programs of all
    the work, or more, and `least_tiles` at least; a block is cut if it has more than SLACK times as many. RAGGED also
    tries shorter segments, where the last of the waves of `places` programs is the reason, with `most_extra` items
    more than blocks at most. Writes plan [num_sequences + 1, PLAN_FIELDS] int32, whose last row holds the ends: every
    program writes all of it, the same numbers, and so waits for no other. Writes items, -1 as the sequence of those
    that are none. A sequence's last block of rows comes first: it sees most keys. `search_steps` halvings find a
    sequence.
    """
    lanes = tl.arange(0, CHUNK)
    work = tl.zeros([CHUNK], tl.int64)
    for start in range(0, num_sequences, CHUNK):
        _blocks, _tiles, tiles_of_all = _blocks_and_tiles(
            query_start, contexts, start + lanes, num_sequences, least_new, most_new, GROUP, BLOCK_M, BLOCK_N, WINDOW
        )
        work += tiles_of_all
    tiles_in_all = tl.sum(work, 0) * NUM_KV_HEADS
    length = tl.maximum(tl.cdiv(tiles_in_all, target), least_tiles).to(tl.int32)
    if RAGGED:
        cost, _extra = _cost(
            query_start, contexts, num_sequences, least_new, most_new, length, places,
            NUM_KV_HEADS, GROUP, BLOCK_M, BLOCK_N, WINDOW, SLACK, CHUNK,
        )  # fmt: skip
        for wave in range(1, MORE_WAVES + 1):
            shorter = tl.maximum(tl.cdiv(tiles_in_all, target + wave * places), least_tiles).to(tl.int32)
            shorter_cost, extra = _cost(
                query_start, contexts, num_sequences, least_new, most_new, shorter, places,
                NUM_KV_HEADS, GROUP, BLOCK_M, BLOCK_N, WINDOW, SLACK, CHUNK,
            )  # fmt: skip
            better = (shorter_cost < cost) & (extra <= most_extra)
            length = tl.where(better, shorter, length)
            cost = tl.where(better, shorter_cost, cost)
    num_items, num_partials = 0, 0
    for start in range(0, num_sequences, CHUNK):
        sequences = start + lanes
        blocks, tiles, _of_all = _blocks_and_tiles(
            query_start, contexts, sequences, num_sequences, least_new, most_new, GROUP, BLOCK_M, BLOCK_N, WINDOW
        )
        segments = _segments(tiles, length, SLACK)
        own = blocks * segments
        partials = tl.where(segments > 1, own, 0)
        row = plan + sequences * PLAN_FIELDS
        live = sequences < num_sequences
        tl.store(row, num_items + tl.cumsum(own, 0) - own, mask=live)
        tl.store(row + 1, segments, mask=live)
        tl.store(row + 2, num_partials + tl.cumsum(partials, 0) - partials, mask=live)
        num_items += tl.sum(own, 0)
        num_partials += tl.sum(partials, 0)
    tl.store(plan + num_sequences * PLAN_FIELDS, num_items)
    tl.debug_barrier()  # what some threads have written, others read

    index = tl.program_id(0) * CHUNK + lanes
    used = index < num_items
    # The last sequence whose items begin at `index` or before: those without items begin where the next one does.
    low = tl.zeros([CHUNK], tl.int32)
    high = tl.zeros([CHUNK], tl.int32) + num_sequences
    for _ in range(search_steps):
        middle = (low + high) // 2
        before = tl.load(plan + middle * PLAN_FIELDS) <= index
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    row = plan + low * PLAN_FIELDS
    begin = tl.load(row)
    segments = tl.load(row + 1)
    blocks = (tl.load(row + PLAN_FIELDS) - begin) // segments
    order = (index - begin) // segments
    item = items + index * ITEM_FIELDS
    written = index < max_items
    tl.store(item, tl.where(used, low, -1), mask=written)
    tl.store(item + 1, blocks - 1 - order, mask=written)
    tl.store(item + 2, (index - begin) % segments, mask=written)
    tl.store(item + 3, segments, mask=written)
    tl.store(item + 4, tl.load(row + 2) + order * segments, mask=written)
