"""A KV cache in 8 bits: float8_e4m3fn, with one scale for each token and head of keys, and of values.

A head's vector is stored as its share of its own largest number, at 448, the largest that the format has: 3 bits of
mantissa wherever the vector lies, and no calibration. A number is off by 2**-4 of itself at most, and by 2**-10 / 448
of the largest where it is too small for that.
"""

import torch

KV_FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(KV_FP8).max  # 448
SCALE_BYTES = 4  # of a token and head, in each plane


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., head_dim] → the same in KV_FP8, and its scales [...] float32. What is no number stays none."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    scales = torch.where(largest > 0, largest / LARGEST, 1.0)
    return (wide / scales[..., None]).to(KV_FP8), scales


def dequantise(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse: values [..., head_dim] in KV_FP8 and scales [...] → [..., head_dim]."""
    return (values.float() * scales[..., None]).to(dtype)
