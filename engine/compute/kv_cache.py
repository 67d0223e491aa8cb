"""The KV cache of all layers as one allocation, and what is done to its blocks from outside the layers."""

import torch

from engine.compute.attention import KVCache, KVLayout
from engine.compute.kv_fp8 import KV_FP8, SCALE_BYTES


def bytes_per_token(layout: KVLayout, num_layers: int, dtype: torch.dtype) -> int:
    """Of a token in all layers, with the scales of 8-bit values."""
    scales = layout.planes * layout.num_heads * SCALE_BYTES if dtype == KV_FP8 else 0
    return num_layers * (layout.elements_per_token * dtype.itemsize + scales)


def allocate(layout: KVLayout, num_layers: int, num_slots: int, dtype: torch.dtype, device: torch.device) -> KVCache:
    """Zeros, because a masked-out slot is still multiplied: uninitialised memory may hold NaN."""
    size = (num_layers, layout.planes, num_slots, layout.num_heads)
    scales = torch.zeros(size, device=device) if dtype == KV_FP8 else None
    return KVCache(torch.zeros(*size, layout.head_dim, dtype=dtype, device=device), scales)


def clear_blocks(cache: KVCache, blocks: torch.Tensor, block_size: int) -> None:
    """Zeros the blocks [num_cleared] int64 of all layers."""
    for part in _parts(cache, block_size):
        part.index_fill_(2, blocks, 0)


def copy_blocks(cache: KVCache, sources: torch.Tensor, targets: torch.Tensor, block_size: int) -> None:
    """Copies blocks of all layers, sources to targets [num_copied] int64; all are read before any is written."""
    for part in _parts(cache, block_size):
        part[:, :, targets] = part[:, :, sources]


def _parts(cache: KVCache, block_size: int) -> list[torch.Tensor]:
    """[num_layers, planes, num_blocks, block_size, num_kv_heads, ...] views; 8-bit floats as bytes, for which torch has
    all operations."""
    if cache.scales is None:
        return [cache.values.unflatten(2, (-1, block_size))]
    return [part.unflatten(2, (-1, block_size)) for part in (cache.values.view(torch.uint8), cache.scales)]
