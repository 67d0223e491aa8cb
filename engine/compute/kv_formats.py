"""The number formats of keys and values that are smaller than the model's, and the rounding to them.

Each vector of a token and head is quantised by itself, when it is written. No calibration is needed, and a vector never
depends on its neighbours.

- `fp8` (float8_e4m3fn) and `int8`: code * scale. The scale puts the vector's largest number at the largest code.
- `int4`: code * scale + least, by groups. A byte holds number i of the vector's first half, in its low bits, and number
  i of the second half: a pair that rotary embedding rotates together. GROUP / 2 neighbouring bytes are a group.

A vector with an infinity or NaN gets the scale NaN, so that it shows.
"""

import torch

KV_FP8 = torch.float8_e4m3fn
KV_INT8 = torch.int8
KV_INT4 = torch.uint8  # two codes in each
QUANTISED = {"fp8": KV_FP8, "int8": KV_INT8, "int4": KV_INT4}  # values of the setting kv_cache_dtype
LARGEST = {KV_FP8: torch.finfo(KV_FP8).max, KV_INT8: 127.0}  # 448 and 127: the largest code
GROUP = 32  # numbers of an int4 vector that share a scale
INT4_LEVELS = 15  # steps between the least and the largest number of a group
SCALE_BYTES = 4  # of a vector, or of an int4 group: one float32, or scale and least number in bfloat16
SMALLEST = 1e-30  # vectors whose numbers are all smaller become zeros: their scale would underflow
HALF_STEP = 2.0**-8  # relative; a bfloat16 is rounded by less


def is_quantised(dtype: torch.dtype) -> bool:
    return dtype in QUANTISED.values()


def cpp_format(dtype: torch.dtype) -> int:
    """`enum Format` of cpp/kv_formats.h."""
    return (torch.float32, *QUANTISED.values()).index(dtype)


def stored_dim(head_dim: int, dtype: torch.dtype) -> int:
    """Elements of `dtype` that a vector of `head_dim` numbers takes."""
    return head_dim // 2 if dtype == KV_INT4 else head_dim


def num_groups(head_dim: int, dtype: torch.dtype) -> int:
    """Scales of a vector."""
    return -(-head_dim // GROUP) if dtype == KV_INT4 else 1


def vector_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Of a token and head in one plane, with its scales."""
    scale_bytes = num_groups(head_dim, dtype) * SCALE_BYTES if is_quantised(dtype) else 0
    return stored_dim(head_dim, dtype) * dtype.itemsize + scale_bytes


def scale_shape(head_dim: int, dtype: torch.dtype) -> tuple[tuple[int, ...], torch.dtype]:
    """Dimensions of a vector's scales, and their dtype."""
    return ((num_groups(head_dim, dtype), 2), torch.bfloat16) if dtype == KV_INT4 else ((), torch.float32)


def quantise(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] → codes [..., stored_dim] in `dtype`, and scales [...] or, in int4, [..., num_groups, 2]."""
    wide = x.float()
    if dtype == KV_INT4:
        return _quantise_int4(wide)
    largest = wide.abs().amax(-1)
    scales = torch.where(largest >= SMALLEST, largest / LARGEST[dtype], 1.0)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    codes = wide / scales[..., None]
    return (codes.to(dtype) if dtype == KV_FP8 else codes.round().nan_to_num().to(dtype)), scales


def dequantise(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: codes and scales of `quantise` → [..., head_dim] in `dtype`."""
    if codes.dtype != KV_INT4:
        return (codes.float() * scales[..., None]).to(dtype)
    numbers = torch.cat((codes & 15, codes >> 4), -1).float()
    by_byte = (part.repeat_interleave(GROUP // 2, -1)[..., : codes.shape[-1]] for part in scales.float().unbind(-1))
    scale, least = (torch.cat((part, part), -1) for part in by_byte)
    return (numbers * scale + least).to(dtype)


def _quantise_int4(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The least number is rounded down and the scale up, so that all numbers lie between the first and last code."""
    pairs = x.unflatten(-1, (2, -1)).transpose(-1, -2)  # [..., bytes, 2]
    size = pairs.shape[-2]
    missing = num_groups(2 * size, KV_INT4) * GROUP // 2 - size
    last = pairs[..., -1:, :].expand(*x.shape[:-1], missing, 2)  # moves neither the least nor the largest number
    groups = torch.cat((pairs, last), -2).unflatten(-2, (-1, GROUP // 2)).flatten(-2)
    exact_least, largest = groups.amin(-1), groups.amax(-1)
    least = (exact_least - exact_least.abs() * HALF_STEP).bfloat16()
    step = (largest - least.float()) / INT4_LEVELS
    scale = torch.where(step >= SMALLEST, step * (1 + HALF_STEP), 1.0)
    scale = torch.where(step.isfinite(), scale, torch.nan).bfloat16()
    by_scale = (groups - least.float()[..., None]) / scale.float()[..., None]
    codes = by_scale.round().nan_to_num().to(torch.uint8).unflatten(-1, (-1, 2)).flatten(-3, -2)[..., :size, :]
    return codes[..., 0] | codes[..., 1] << 4, torch.stack((scale, least), -1)
