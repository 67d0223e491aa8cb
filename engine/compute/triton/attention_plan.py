"""Who computes what of a step's attention: a list of work items, made on the device from the lengths that are there.

The host knows only bounds, and they are what grids and memory are sized by; so a captured graph serves any lengths. A
block of rows whose context is long for the whole step's work is cut into segments of like length.
"""

import triton
import triton.language as tl

from engine.compute.triton.attention import ITEM_FIELDS

PLAN_FIELDS = tl.constexpr(4)  # of a sequence: first item, segments of each block, first partial result, first split


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


@triton.jit(
    do_not_specialize=["num_sequences", "least_new", "most_new", "target", "least_tiles", "max_splits"],
    do_not_specialize_on_alignment=["query_start", "contexts"],
)
def plan_sequences_kernel(
    query_start,
    contexts,
    plan,
    splits,
    num_sequences,
    least_new,
    most_new,
    target,
    least_tiles,
    max_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SLACK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """How many segments each sequence's blocks are cut into, and where their items begin; grid (1,).

    Only sequences with least_new to most_new new tokens. A segment has as many tiles as make `target` programs of all
    the work, or more, and `least_tiles` at least; a block is cut if it has more than SLACK times as many. Writes plan
    [num_sequences + 1, PLAN_FIELDS] int32, whose last row holds the ends, and -1 to splits [max_splits].
    """
    lanes = tl.arange(0, CHUNK)
    work = tl.zeros([CHUNK], tl.int64)
    for start in range(0, num_sequences, CHUNK):
        _, _, tiles_of_all = _blocks_and_tiles(
            query_start, contexts, start + lanes, num_sequences, least_new, most_new, GROUP, BLOCK_M, BLOCK_N, WINDOW
        )
        work += tiles_of_all
    share = tl.cdiv(tl.sum(work, 0) * NUM_KV_HEADS, target)
    length = tl.maximum(share, least_tiles).to(tl.int32)
    num_items, num_partials, num_splits = 0, 0, 0
    for start in range(0, num_sequences, CHUNK):
        sequences = start + lanes
        blocks, tiles, _ = _blocks_and_tiles(
            query_start, contexts, sequences, num_sequences, least_new, most_new, GROUP, BLOCK_M, BLOCK_N, WINDOW
        )
        # Rounded down, so that the segments are no more than were aimed at: one program more may be a wave more.
        cut = (tiles > length * SLACK) & (tiles >= 2 * length)
        segments = tl.where(cut, tiles // length, 1)
        items = blocks * segments
        partials = tl.where(cut, items, 0)
        cut_blocks = tl.where(cut, blocks, 0)
        row = plan + sequences * PLAN_FIELDS
        live = sequences < num_sequences
        tl.store(row, num_items + tl.cumsum(items, 0) - items, mask=live)
        tl.store(row + 1, segments, mask=live)
        tl.store(row + 2, num_partials + tl.cumsum(partials, 0) - partials, mask=live)
        tl.store(row + 3, num_splits + tl.cumsum(cut_blocks, 0) - cut_blocks, mask=live)
        num_items += tl.sum(items, 0)
        num_partials += tl.sum(partials, 0)
        num_splits += tl.sum(cut_blocks, 0)
    end = plan + num_sequences * PLAN_FIELDS
    tl.store(end, num_items)
    tl.store(end + 2, num_partials)
    tl.store(end + 3, num_splits)
    for start in range(0, max_splits, CHUNK):
        tl.store(splits + start + lanes, -1, mask=start + lanes < max_splits)


@triton.jit(do_not_specialize=["num_sequences", "search_steps", "max_items"])
def plan_items_kernel(plan, items, splits, num_sequences, search_steps, max_items, CHUNK: tl.constexpr):
    """Writes the work items, -1 as the sequence of those that are none; grid (ceil(max_items / CHUNK),).

    A sequence's last block of rows comes first: it sees most keys. `search_steps` halvings find a sequence.
    """
    index = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    used = index < tl.load(plan + num_sequences * PLAN_FIELDS)
    # The last sequence whose items begin at `index` or before: those without items begin where the next one does.
    low = tl.zeros([CHUNK], tl.int32)
    high = tl.zeros([CHUNK], tl.int32) + num_sequences
    for _ in range(search_steps):
        middle = (low + high) // 2
        before = tl.load(plan + middle * PLAN_FIELDS) <= index
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    row = plan + low * PLAN_FIELDS
    first = tl.load(row)
    segments = tl.load(row + 1)
    partial = tl.load(row + 2)
    split = tl.load(row + 3)
    blocks = (tl.load(row + PLAN_FIELDS) - first) // segments
    order = (index - first) // segments
    segment = (index - first) % segments
    block = blocks - 1 - order
    item = items + index * ITEM_FIELDS
    written = index < max_items
    tl.store(item, tl.where(used, low, -1), mask=written)
    tl.store(item + 1, block, mask=written)
    tl.store(item + 2, segment, mask=written)
    tl.store(item + 3, segments, mask=written)
    tl.store(item + 4, partial + order * segments, mask=written)
    tl.store(splits + split + order, index, mask=used & (segments > 1) & (segment == 0))
