"""Vectors of keys and values as `kv_formats` stores them, written and read by Triton kernels.

FORMAT is FLOAT for numbers of the cache's dtype, or FP8, INT8, INT4.
"""

import torch
import triton
import triton.language as tl

from sojourn.engine.compute import kv_formats as formats

FLOAT, FP8, INT8, INT4 = (tl.constexpr(number) for number in range(4))
_NUMBERS = {formats.KV_FP8: 1, formats.KV_INT8: 2, formats.KV_INT4: 3}
FP8_MAX = tl.constexpr(formats.LARGEST[formats.KV_FP8])
INT8_MAX = tl.constexpr(formats.LARGEST[formats.KV_INT8])
INT4_LEVELS = tl.constexpr(formats.INT4_LEVELS)
SMALLEST = tl.constexpr(formats.SMALLEST)
ROUND_UP = tl.constexpr(1 + formats.HALF_STEP)
HALF_STEP = tl.constexpr(formats.HALF_STEP)
GROUP_BYTES = tl.constexpr(formats.GROUP // 2)  # of int4 codes that share a scale
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds to a whole number, ties to even


def format_of(dtype: torch.dtype) -> int:
    """FORMAT of a cache whose values have this dtype."""
    return _NUMBERS.get(dtype, 0)


@triton.jit
def vectors_of(slot, heads, num_kv_heads, BLOCK_SIZE: tl.constexpr, TOKEN_STRIDE: tl.constexpr,
               HEAD_STRIDE: tl.constexpr):  # fmt: skip
    """Which vectors of a plane of the cache the heads of a slot are."""
    block = slot // BLOCK_SIZE * (BLOCK_SIZE * num_kv_heads)
    return block + slot % BLOCK_SIZE * TOKEN_STRIDE + heads * HEAD_STRIDE


@triton.jit
def store_halves(first, second, codes_pointer, scales_pointer, vectors, inside, half_columns, head_dim,
                 FORMAT: tl.constexpr):  # fmt: skip
    """Vectors [heads, HALF] as both their halves → the cache, with their scales. Columns behind the halves hold 0."""
    half = head_dim // 2
    mask = inside[:, None] & (half_columns < half)[None, :]
    if FORMAT == INT4:
        _store_int4(first, second, codes_pointer, scales_pointer, vectors, inside, half_columns, half)
    else:
        if FORMAT != FLOAT:
            scale = _scale(tl.maximum(_largest(first), _largest(second)), FORMAT)
            tl.store(scales_pointer + vectors, scale, mask=inside)
            first, second = _codes(first, scale, FORMAT), _codes(second, scale, FORMAT)
        place = vectors[:, None] * head_dim + half_columns[None, :]
        tl.store(codes_pointer + place, first.to(codes_pointer.dtype.element_ty), mask=mask)
        tl.store(codes_pointer + place + half, second.to(codes_pointer.dtype.element_ty), mask=mask)


@triton.jit
def store_vectors(numbers, codes_pointer, scales_pointer, vectors, inside, columns, head_dim, FORMAT: tl.constexpr):
    """Vectors [heads, BLOCK] → the cache, in any format but int4. Columns behind the vectors hold 0."""
    if FORMAT != FLOAT:
        scale = _scale(_largest(numbers), FORMAT)
        tl.store(scales_pointer + vectors, scale, mask=inside)
        numbers = _codes(numbers, scale, FORMAT)
    out = codes_pointer + vectors[:, None] * head_dim + columns[None, :]
    mask = inside[:, None] & (columns < head_dim)[None, :]
    tl.store(out, numbers.to(codes_pointer.dtype.element_ty), mask=mask)


@triton.jit
def load_int4(codes, scales, vectors, live, head_dim: tl.constexpr, BYTES: tl.constexpr):
    """Vectors [n] of int4 codes → float32 [n, 2 * BYTES], the numbers of both halves in turns; 0 where not `live` and
    behind the vectors."""
    half: tl.constexpr = head_dim // 2
    groups: tl.constexpr = (half + GROUP_BYTES - 1) // GROUP_BYTES
    columns = tl.arange(0, BYTES)
    mask = live[:, None] & (columns < half)[None, :]
    both = tl.load(codes + vectors[:, None] * half + columns[None, :], mask=mask, other=0)
    places = (vectors[:, None] * groups + (columns // GROUP_BYTES)[None, :]) * 2
    scale = tl.load(scales + places, mask=mask, other=0.0).to(tl.float32)
    least = tl.load(scales + places + 1, mask=mask, other=0.0).to(tl.float32)
    low = (both & 15).to(tl.float32) * scale + least
    high = (both >> 4).to(tl.float32) * scale + least
    return tl.interleave(low, high)


@triton.jit
def _largest(numbers):
    """The largest size in each row, NaN where one is no number: a maximum does not tell."""
    wide = numbers.to(tl.float32)
    return tl.max(tl.abs(wide), axis=1) + tl.sum(wide - wide, axis=1)


@triton.jit
def _scale(largest, FORMAT: tl.constexpr):
    limit: tl.constexpr = FP8_MAX if FORMAT == FP8 else INT8_MAX
    return tl.where(largest < SMALLEST, 1.0, largest / limit)


@triton.jit
def _codes(numbers, scale, FORMAT: tl.constexpr):
    codes = numbers.to(tl.float32) / scale[:, None]
    if FORMAT == FP8:
        return codes.to(tl.float8e4nv)
    else:
        return ((codes + ROUNDER) - ROUNDER).to(tl.int8)


@triton.jit
def _store_int4(first, second, codes_pointer, scales_pointer, vectors, inside, half_columns, half):
    heads: tl.constexpr = first.shape[0]
    bytes: tl.constexpr = first.shape[1]
    size: tl.constexpr = GROUP_BYTES if bytes > GROUP_BYTES else bytes
    num_groups: tl.constexpr = bytes // size
    real = tl.reshape(tl.broadcast_to((half_columns < half)[None, :], (heads, bytes)), (heads, num_groups, size))
    first = tl.reshape(first.to(tl.float32), (heads, num_groups, size))
    second = tl.reshape(second.to(tl.float32), (heads, num_groups, size))
    low = tl.min(tl.where(real, tl.minimum(first, second), float("inf")), axis=2)
    high = tl.max(tl.where(real, tl.maximum(first, second), float("-inf")), axis=2)
    bad = tl.sum((first - first) + (second - second), axis=2)
    least = (low - tl.abs(low) * HALF_STEP).to(tl.bfloat16)
    step = (high - least.to(tl.float32)) / INT4_LEVELS + bad
    scale = tl.where(step < SMALLEST, 1.0, step * ROUND_UP).to(tl.bfloat16)
    groups = tl.arange(0, num_groups)
    stored_groups = (half + GROUP_BYTES - 1) // GROUP_BYTES
    places = (vectors[:, None] * stored_groups + groups[None, :]) * 2
    kept = inside[:, None] & (groups < stored_groups)[None, :]
    tl.store(scales_pointer + places, scale, mask=kept)
    tl.store(scales_pointer + places + 1, least, mask=kept)
    by, origin = scale.to(tl.float32)[:, :, None], least.to(tl.float32)[:, :, None]
    low_codes = (((first - origin) / by + ROUNDER) - ROUNDER).to(tl.int32)
    high_codes = (((second - origin) / by + ROUNDER) - ROUNDER).to(tl.int32)
    codes = tl.reshape(low_codes | (high_codes << 4), (heads, bytes)).to(tl.uint8)
    mask = inside[:, None] & (half_columns < half)[None, :]
    tl.store(codes_pointer + vectors[:, None] * half + half_columns[None, :], codes, mask=mask)
