"""The KV cache of all layers as one allocation, and operations on its blocks from outside the layers."""

import math
import mmap
from dataclasses import dataclass

import torch

from sojourn.engine.compute.kv_formats import is_quantised, scale_shape, stored_dim, vector_bytes


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What a slot of the KV cache holds in each layer, as the model says.

    `planes` is 2 for a key and a value, and 1 where one vector is both: the key, of which the first dimensions are the
    value (multi-head latent attention).
    """

    planes: int
    num_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The KV cache of one layer.

    The slot of position p of a sequence is `block_table[p // block_size] * block_size + p % block_size`. In memory the
    vectors of one head of a block are neighbours: attention reads them together. Kernels take any order of the heads
    and tokens of a block.
    """

    values: torch.Tensor  # [planes, num_blocks, block_size, num_kv_heads, stored_dim]: head_dim, or codes of so many
    scales: torch.Tensor | None = None  # of codes: [planes, num_blocks, block_size, num_kv_heads, *scale_shape]

    def strides(self) -> tuple[int, int]:
        """Vectors between two tokens of a block, and between two of its heads."""
        _, _, block_size, num_heads, size = self.values.shape
        _, block, token, head, one = self.values.stride()
        assert one == 1 and block == block_size * num_heads * size, "blocks and vectors are dense"
        if self.scales is not None:
            per_vector = self.scales[0, 0, 0, 0].numel()
            assert self.scales.stride()[1:4] == tuple(s // size * per_vector for s in (block, token, head)), "as values"
        return token // size, head // size

    def addresses(self) -> tuple[int, int, int | None, int | None]:
        """Of the keys and the values, and of their scales. One plane is both."""
        return *_plane_addresses(self.values), *((None, None) if self.scales is None else _plane_addresses(self.scales))


@dataclass(frozen=True, slots=True, weakref_slot=True)
class KVCache:
    """The KV cache of all layers, as the model's KVLayout says."""

    values: torch.Tensor  # [num_layers, planes, num_blocks, block_size, num_kv_heads, stored_dim]
    scales: torch.Tensor | None = None  # [num_layers, planes, num_blocks, block_size, num_kv_heads, *scale_shape]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def layers(self) -> list[LayerCache]:
        scales = [None] * len(self.values) if self.scales is None else self.scales.unbind(0)
        return [LayerCache(values, scale) for values, scale in zip(self.values.unbind(0), scales, strict=True)]


def bytes_per_token(layout: KVLayout, num_layers: int, dtype: torch.dtype) -> int:
    """Of a token in all layers, with the scales of codes."""
    return num_layers * layout.planes * layout.num_heads * vector_bytes(layout.head_dim, dtype)


def allocate(
    layout: KVLayout, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Zeros, because a masked-out slot is still multiplied: uninitialised memory may hold NaN."""
    size = (num_layers, layout.planes, num_blocks, layout.num_heads, block_size)
    scales = None
    if is_quantised(dtype):
        per_vector, scale_dtype = scale_shape(layout.head_dim, dtype)
        scales = zeros((*size, *per_vector), scale_dtype, device).transpose(3, 4)
    return KVCache(zeros((*size, stored_dim(layout.head_dim, dtype)), dtype, device).transpose(3, 4), scales)


def zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU zero pages of the system, which take memory when they are first written: torch.zeros would write all."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    nbytes = math.prod(size) * dtype.itemsize
    try:
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise RuntimeError(f"{nbytes:,} bytes: {error.strerror}") from None
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(size)


def clear_blocks(cache: KVCache, blocks: torch.Tensor) -> None:
    """Zeros the blocks [num_cleared] int64 of all layers."""
    for part in parts(cache):
        part.index_fill_(2, blocks, 0)


def copy_blocks(cache: KVCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies blocks of all layers, sources to targets [num_copied] int64; all are read before any is written."""
    for part in parts(cache):
        part[:, :, targets] = part[:, :, sources]


def parts(cache: KVCache) -> list[torch.Tensor]:
    """[num_layers, planes, num_blocks, ...] each; codes as bytes, for which torch has all operations."""
    return [cache.values] if cache.scales is None else [cache.values.view(torch.uint8), cache.scales]


def _plane_addresses(planes: torch.Tensor) -> tuple[int, int]:
    first = planes.data_ptr()
    return first, first + (len(planes) - 1) * planes.stride(0) * planes.itemsize
