"""From fused queries, keys and values to queries and a written cache, in one launch."""

import torch
import triton
import triton.language as tl

from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.kv_formats import stored_dim
from sojourn.engine.compute.operations.backend import HeadSpec, Rope
from sojourn.engine.compute.operations.reference import gemma_rms_norm
from sojourn.engine.compute.triton.kv_formats import INT4, format_of, store_halves, store_vectors, vectors_of

TILE = 256  # elements of half a head that one warp takes: 16 bytes a thread and load in 16 bits


@triton.jit
def _normed(first, second, weight_pointer, half_columns, head_dim, eps, GEMMA: tl.constexpr):
    """Both halves of some heads, each head under its root-mean-square norm; rounded before the weight but for Gemma,
    whose weights are stored less one."""
    half = head_dim // 2
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first, axis=1) + tl.sum(wide_second * wide_second, axis=1)
    factor = tl.rsqrt(squares / head_dim + eps)[:, None]
    columns = half_columns < half
    weight_first = tl.load(weight_pointer + half_columns, mask=columns, other=0.0).to(tl.float32)
    weight_second = tl.load(weight_pointer + half + half_columns, mask=columns, other=0.0).to(tl.float32)
    if GEMMA:
        return (
            (wide_first * factor * (1.0 + weight_first[None, :])).to(first.dtype),
            (wide_second * factor * (1.0 + weight_second[None, :])).to(first.dtype),
        )
    return (
        ((wide_first * factor).to(first.dtype).to(tl.float32) * weight_first[None, :]).to(first.dtype),
        ((wide_second * factor).to(first.dtype).to(tl.float32) * weight_second[None, :]).to(first.dtype),
    )


@triton.jit
def _rotated(first, second, cos_pointer, sin_pointer, position, half_columns, head_dim):
    """Rotary embedding in the half-split layout, in float32 and rounded once."""
    half = head_dim // 2
    columns = half_columns < half
    base = position * head_dim + half_columns
    cos_first = tl.load(cos_pointer + base, mask=columns, other=0.0).to(tl.float32)[None, :]
    cos_second = tl.load(cos_pointer + base + half, mask=columns, other=0.0).to(tl.float32)[None, :]
    sin_first = tl.load(sin_pointer + base, mask=columns, other=0.0).to(tl.float32)[None, :]
    sin_second = tl.load(sin_pointer + base + half, mask=columns, other=0.0).to(tl.float32)[None, :]
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    return (
        (wide_first * cos_first - wide_second * sin_first).to(first.dtype),
        (wide_second * cos_second + wide_first * sin_second).to(first.dtype),
    )


@triton.jit
def heads_kernel(
    qkv_pointer, q_norm_pointer, k_norm_pointer, cos_pointer, sin_pointer, positions_pointer, slots_pointer,
    query_pointer, values_pointer, scales_pointer,
    qkv_stride, value_plane, scale_plane, eps, num_heads, num_kv_heads, head_dim,
    NORM: tl.constexpr, GEMMA: tl.constexpr, ROPE: tl.constexpr, FORMAT: tl.constexpr, HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
):  # fmt: skip
    """Programs (token, group of heads): first the groups of query heads, then those of KV heads."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    half = head_dim // 2
    half_columns = tl.arange(0, HALF)
    query_groups = tl.cdiv(num_heads, HEADS)
    row = qkv_pointer + token * qkv_stride
    position = tl.full((), 0, tl.int64)
    if ROPE:
        position = tl.load(positions_pointer + token)
    if group < query_groups:
        heads = group * HEADS + tl.arange(0, HEADS)
        inside = heads < num_heads
        mask = inside[:, None] & (half_columns < half)[None, :]
        place = heads[:, None] * head_dim + half_columns[None, :]
        first = tl.load(row + place, mask=mask, other=0.0)
        second = tl.load(row + place + half, mask=mask, other=0.0)
        if NORM:
            first, second = _normed(first, second, q_norm_pointer, half_columns, head_dim, eps, GEMMA)
        if ROPE:
            first, second = _rotated(first, second, cos_pointer, sin_pointer, position, half_columns, head_dim)
        out = query_pointer + token * num_heads * head_dim + place
        tl.store(out, first, mask=mask)
        tl.store(out + half, second, mask=mask)
    else:
        slot = tl.load(slots_pointer + token)
        if slot >= 0:
            heads = (group - query_groups) * HEADS + tl.arange(0, HEADS)
            inside = heads < num_kv_heads
            mask = inside[:, None] & (half_columns < half)[None, :]
            place = (num_heads + heads)[:, None] * head_dim + half_columns[None, :]
            first = tl.load(row + place, mask=mask, other=0.0)
            second = tl.load(row + place + half, mask=mask, other=0.0)
            value = row + num_kv_heads * head_dim + place
            value_first = tl.load(value, mask=mask, other=0.0)
            value_second = tl.load(value + half, mask=mask, other=0.0)
            if NORM:
                first, second = _normed(first, second, k_norm_pointer, half_columns, head_dim, eps, GEMMA)
            if ROPE:
                first, second = _rotated(first, second, cos_pointer, sin_pointer, position, half_columns, head_dim)
            vectors = vectors_of(slot, heads, num_kv_heads, BLOCK_SIZE, TOKEN_STRIDE, HEAD_STRIDE)
            store_halves(first, second, values_pointer, scales_pointer, vectors, inside, half_columns, head_dim, FORMAT)
            store_halves(value_first, value_second, values_pointer + value_plane, scales_pointer + scale_plane,
                         vectors, inside, half_columns, head_dim, FORMAT)  # fmt: skip


@triton.jit
def write_kernel(
    plane_pointer, slots_pointer, values_pointer, scales_pointer, token_stride, head_stride, num_kv_heads, head_dim,
    FORMAT: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_pointer + token)
    if slot >= 0:
        heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
        inside = heads < num_kv_heads
        rows = vectors_of(slot, heads, num_kv_heads, BLOCK_SIZE, TOKEN_STRIDE, HEAD_STRIDE)
        head_rows = plane_pointer + token * token_stride + heads[:, None] * head_stride
        if FORMAT == INT4:
            half = head_dim // 2
            columns = tl.arange(0, BLOCK // 2)
            mask = inside[:, None] & (columns < half)[None, :]
            first = tl.load(head_rows + columns[None, :], mask=mask, other=0.0)
            second = tl.load(head_rows + half + columns[None, :], mask=mask, other=0.0)
            store_halves(first, second, values_pointer, scales_pointer, rows, inside, columns, head_dim, FORMAT)
        else:
            columns = tl.arange(0, BLOCK)
            mask = inside[:, None] & (columns < head_dim)[None, :]
            numbers = tl.load(head_rows + columns[None, :], mask=mask, other=0.0)
            store_vectors(numbers, values_pointer, scales_pointer, rows, inside, columns, head_dim, FORMAT)


def write_heads(
    qkv: torch.Tensor, heads: HeadSpec, rope: Rope | None, slots: torch.Tensor, layer_cache: LayerCache
) -> torch.Tensor:
    """Operations.write_heads."""
    tokens, dim = len(qkv), heads.head_dim
    query = torch.empty((tokens, heads.num_heads, dim), dtype=qkv.dtype, device=qkv.device)
    if tokens == 0:
        return query
    values, scales = layer_cache.values, layer_cache.scales
    assert dim % 2 == 0 and qkv.stride(1) == 1, "halves of neighbours"
    token_stride, head_stride = layer_cache.strides()
    half = triton.next_power_of_2(dim // 2)
    size = max(1, TILE // half)
    groups = triton.cdiv(heads.num_heads, size) + triton.cdiv(heads.num_kv_heads, size)
    heads_kernel[(tokens, groups)](
        qkv, heads.q_norm, heads.k_norm, rope.cos if rope else None, rope.sin if rope else None,
        rope.positions if rope else None, slots, query, values, values if scales is None else scales,
        qkv.stride(0), values.stride(0), 0 if scales is None else scales.stride(0), heads.norm_eps,
        heads.num_heads, heads.num_kv_heads, dim,
        NORM=heads.q_norm is not None, GEMMA=heads.norm is gemma_rms_norm, ROPE=rope is not None,
        FORMAT=format_of(values.dtype), HEADS=size, HALF=half,
        BLOCK_SIZE=values.shape[2], TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride, num_warps=1,
    )  # fmt: skip
    return query


def write(key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor, layer_cache: LayerCache) -> None:
    """Operations.write."""
    token_stride, head_stride = layer_cache.strides()
    for plane, vectors in enumerate((key,) if value is None else (key, value)):
        tokens, num_kv_heads, dim = vectors.shape
        if tokens == 0:
            return
        values, scales = layer_cache.values[plane], layer_cache.scales
        assert vectors.stride(2) == 1, "vectors of neighbours"
        assert stored_dim(dim, values.dtype) == values.shape[3], "a plane holds vectors of one size"
        block = triton.next_power_of_2(dim)
        size = min(triton.next_power_of_2(num_kv_heads), max(1, 1024 // block))
        write_kernel[(tokens, triton.cdiv(num_kv_heads, size))](
            vectors, slots, values, scales[plane] if scales is not None else None,
            vectors.stride(0), vectors.stride(1), num_kv_heads, dim,
            FORMAT=format_of(values.dtype), HEADS=size, BLOCK=block,
            BLOCK_SIZE=values.shape[1], TOKEN_STRIDE=token_stride, HEAD_STRIDE=head_stride,
        )  # fmt: skip
