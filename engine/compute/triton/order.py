"""Places in the order of a row's logits, from the most to the least probable, found by bisection and without a sort.

A row stands in its own memory, or, of those logits that truncation may leave, in the memory where they are kept aside.
"""

import triton
import triton.language as tl


@triton.jit
def key_of(x):
    """Integers in the order of the numbers; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def number_of(key):
    """The number of a key."""
    bits = key.to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def least_key(bound):
    """The key of the least float32 that is not below a float64."""
    near = bound.to(tl.float32)
    return key_of(near) + (near.to(tl.float64) < bound).to(tl.int64)


@triton.jit
def scale_of(temperature):
    """What a difference of logits is multiplied by, so that 2 to the power of it is a weight."""
    return (1.4426950408889634 / tl.where(temperature == 0, 1.0, temperature)).to(tl.float32)


@triton.jit
def weights_of(x, mask, best, scale):
    return tl.where(mask, tl.exp2((x - best) * scale), 0.0).to(tl.float64)


@triton.jit
def values_at(row, aside, is_aside, offsets, size):
    """Logits in float32, out of the row, or out of those of the row that are kept aside."""
    inside = offsets < size
    own = tl.load(row + offsets, mask=inside & (not is_aside), other=float("-inf")).to(tl.float32)
    return tl.where(is_aside, tl.load(aside + offsets, mask=inside & is_aside, other=float("-inf")), own)


@triton.jit
def above_key(row, aside, is_aside, size, key, best, scale, BLOCK: tl.constexpr):
    """Weight and number of the values whose key is above `key`."""
    weight = tl.zeros((BLOCK,), tl.float64)
    count = tl.zeros((BLOCK,), tl.int32)
    for begin in range(0, size, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        x = values_at(row, aside, is_aside, offsets, size)
        above = key_of(x) > key
        weight += weights_of(x, above, best, scale)
        count += above.to(tl.int32)
    return tl.sum(weight, axis=0), tl.sum(count, axis=0)


@triton.jit
def threshold(row, aside, is_aside, size, low, high, wanted, best, scale, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The highest key so that the values from it on reach `wanted`; those from `low` on do, from `high` on do not."""
    while high - low > 1:
        middle = low + (high - low) // 2
        weight, count = above_key(row, aside, is_aside, size, middle - 1, best, scale, BLOCK)
        reached = count >= wanted if BY_COUNT else weight >= wanted
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def place_in_order(row, aside, is_aside, size, low, target, best, scale, BLOCK: tl.constexpr):
    """Where, in the order of indices, the weights from key `low` on add up to more than `target`."""
    before = tl.zeros((), tl.float64)
    place = tl.full((), -1, tl.int32)
    last = tl.zeros((), tl.int32)  # where rounding lets the sum fall short of its own total
    for begin in range(0, size, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        x = values_at(row, aside, is_aside, offsets, size)
        weights = weights_of(x, key_of(x) >= low, best, scale)
        sums = before + tl.cumsum(weights, axis=0)
        first = tl.min(tl.where((sums > target) & (weights > 0), offsets, size), axis=0)
        place = tl.where((place < 0) & (first < size), first, place)
        last = tl.maximum(last, tl.max(tl.where(weights > 0, offsets, 0), axis=0))
        before += tl.sum(weights, axis=0)
    return tl.where(place < 0, last, place)


@triton.jit
def place_of_equal(row, aside, is_aside, size, key, rank, BLOCK: tl.constexpr):
    """Where the value number `rank`, from 0, of those with this key stands."""
    seen = tl.zeros((), tl.int32)
    place = tl.zeros((), tl.int32)
    for begin in range(0, size, BLOCK):
        offsets = begin + tl.arange(0, BLOCK)
        x = values_at(row, aside, is_aside, offsets, size)
        equal = ((key_of(x) == key) & (offsets < size)).to(tl.int32)
        number = seen + tl.cumsum(equal, axis=0) - 1
        place = tl.maximum(place, tl.max(tl.where((equal > 0) & (number == rank), offsets, 0), axis=0))
        seen += tl.sum(equal, axis=0)
    return place


@triton.jit
def place_by_rank(
    row, aside, is_aside, size, low, high, top_k, top_p, all_weight, draw, best, scale, BLOCK: tl.constexpr
):
    """Where the drawn value stands: truncation by top-k, then by top-p, then a draw in the order of probability.

    Of the values with the lowest key that is kept, the first `ties` are. `all_weight` is that of the values from key
    `low` on, and perhaps of others that top-p is sure to cut; 0 if it is to be added up.
    """
    weight, count = above_key(row, aside, is_aside, size, low - 1, best, scale, BLOCK)
    weight = tl.where(all_weight > 0, all_weight, weight)
    ties = tl.full((), 0x7FFFFFFF, tl.int32)
    if (top_k > 0) & (top_k < count):
        low = threshold(row, aside, is_aside, size, low, high, top_k, best, scale, True, BLOCK)
        above, number = above_key(row, aside, is_aside, size, low, best, scale, BLOCK)
        ties = (top_k - number).to(tl.int32)
        weight = above + ties * tl.exp2((number_of(low) - best) * scale).to(tl.float64)
    if top_p < 1:
        wanted = top_p * weight
        key = threshold(row, aside, is_aside, size, low, high, wanted, best, scale, False, BLOCK)
        above, number = above_key(row, aside, is_aside, size, key, best, scale, BLOCK)
        _, reaching = above_key(row, aside, is_aside, size, key - 1, best, scale, BLOCK)
        one = tl.exp2((number_of(key) - best) * scale).to(tl.float64)
        most = tl.where(key == low, tl.minimum(ties, reaching - number), reaching - number)
        needed = tl.ceil((wanted - above) / one)
        ties = tl.minimum(tl.maximum(needed, 1.0), most.to(tl.float64)).to(tl.int32)
        weight = above + ties * one
        low = key
    target = draw * weight
    # More than the target: from the next number on.
    wanted = (target.to(tl.int64, bitcast=True) + 1).to(tl.float64, bitcast=True)
    key = threshold(row, aside, is_aside, size, low, high, wanted, best, scale, False, BLOCK)
    above, number = above_key(row, aside, is_aside, size, key, best, scale, BLOCK)
    _, reaching = above_key(row, aside, is_aside, size, key - 1, best, scale, BLOCK)
    one = tl.exp2((number_of(key) - best) * scale).to(tl.float64)
    most = tl.where(key == low, tl.minimum(ties, reaching - number), reaching - number)
    rank = tl.minimum(tl.maximum(tl.floor((target - above) / one), 0.0), (most - 1).to(tl.float64)).to(tl.int32)
    return place_of_equal(row, aside, is_aside, size, key, rank, BLOCK)
