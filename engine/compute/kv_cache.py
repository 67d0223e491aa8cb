"""The KV cache of all layers as one allocation, and operations on its blocks from outside the layers.

In 8 bits (float8_e4m3fn) each token and head has one scale for its keys, and one for its values. A head's vector is
stored relative to its own largest number, at 448, the largest of the format: 3 bits of mantissa whatever its size, and
no calibration. A number is off by 2**-4 of itself at most, and by 2**-10 / 448 of the largest where it is too small for
that.
"""

import math
import mmap
from dataclasses import dataclass

import torch

KV_FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(KV_FP8).max  # 448
SCALE_BYTES = 4  # of a token and head, in each plane


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

    values: torch.Tensor  # [planes, num_blocks, block_size, num_kv_heads, head_dim]
    scales: torch.Tensor | None = None  # [planes, num_blocks, block_size, num_kv_heads] float32, of 8-bit values

    def strides(self) -> tuple[int, int]:
        """Vectors between two tokens of a block, and between two of its heads."""
        _, _, block_size, num_heads, head_dim = self.values.shape
        _, block, token, head, one = self.values.stride()
        assert one == 1 and block == block_size * num_heads * head_dim, "blocks and vectors are dense"
        if self.scales is not None:
            assert self.scales.stride()[1:] == (block // head_dim, token // head_dim, head // head_dim), "as the values"
        return token // head_dim, head // head_dim


@dataclass(frozen=True, slots=True, weakref_slot=True)
class KVCache:
    """The KV cache of all layers, as the model's KVLayout says."""

    values: torch.Tensor  # [num_layers, planes, num_blocks, block_size, num_kv_heads, head_dim]
    scales: torch.Tensor | None = None  # [num_layers, planes, num_blocks, block_size, num_kv_heads] float32

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (self.scales.nbytes if self.scales is not None else 0)

    def layers(self) -> list[LayerCache]:
        scales = [None] * len(self.values) if self.scales is None else self.scales.unbind(0)
        return [LayerCache(values, scale) for values, scale in zip(self.values.unbind(0), scales, strict=True)]


def bytes_per_token(layout: KVLayout, num_layers: int, dtype: torch.dtype) -> int:
    """Of a token in all layers, with the scales of 8-bit values."""
    scale_bytes = SCALE_BYTES if dtype == KV_FP8 else 0
    return num_layers * layout.planes * layout.num_heads * (layout.head_dim * dtype.itemsize + scale_bytes)


def allocate(
    layout: KVLayout, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """Zeros, because a masked-out slot is still multiplied: uninitialised memory may hold NaN."""
    size = (num_layers, layout.planes, num_blocks, layout.num_heads, block_size)
    scales = zeros(size, torch.float32, device).transpose(3, 4) if dtype == KV_FP8 else None
    return KVCache(zeros((*size, layout.head_dim), dtype, device).transpose(3, 4), scales)


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
    for part in _parts(cache):
        part.index_fill_(2, blocks, 0)


def copy_blocks(cache: KVCache, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies blocks of all layers, sources to targets [num_copied] int64; all are read before any is written."""
    for part in _parts(cache):
        part[:, :, targets] = part[:, :, sources]


def _parts(cache: KVCache) -> list[torch.Tensor]:
    """[num_layers, planes, num_blocks, ...] each; 8-bit floats as bytes, for which torch has all operations."""
    return [cache.values] if cache.scales is None else [cache.values.view(torch.uint8), cache.scales]


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] → the same in KV_FP8, and its scales [...] float32. NaN stays NaN."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (wide / scales[..., None]).to(KV_FP8), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: values [..., head_dim] in KV_FP8 and scales [...] → [..., head_dim]."""
    return (values.float() * scales[..., None]).to(dtype)
