"""Formats of our own kernels (cpp/gemm_float.cpp, cpp/gemm_int8.cpp): a row's result never depends on other rows."""

import ctypes
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from engine.compute.cpp.extension import Library
from engine.compute.weight_formats.format import WeightFormat
from metrics.errors import ModelError

PANEL = 64  # output channels that lie together
LARGEST_INNER = (2**31 - 1) // (127 * 255)  # of int8: more products may not fit into an int32

_SIZES = (ctypes.c_int64,) * 3
_POINTER = ctypes.c_void_p


def cpp_formats(library: Library) -> dict[str, WeightFormat]:
    """Name → format, of those that this machine's instructions allow: AVX512, and its VNNI for int8."""
    formats = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        if (kernel := _kernel(library, f"linear_{name}", 2)) is not None:
            formats[name] = WeightFormat(name, partial(_pack_float, kernel, dtype))
    if (kernel := _kernel(library, "linear_int8", 4)) is not None:
        formats["int8"] = WeightFormat("int8", partial(_pack_int8, kernel))
    return formats


class CppWeight:
    """A packed matrix and its kernel, which cpp/layers.cpp calls as well. The kernel takes pointers to `parts` last."""

    def __init__(self, kernel: Callable[..., None], shape: torch.Size, *parts: torch.Tensor | None):
        self.out_features, self.in_features = shape
        self.kernel, self._parts = kernel, parts
        self.pointers = tuple(None if part is None else part.data_ptr() for part in parts)
        self.nbytes = sum(part.nbytes for part in parts if part is not None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # The kernels read memory, and would read whatever stands there.
        fitting = x.dtype == torch.float32 and x.dim() == 2 and x.shape[1] == self.in_features
        assert fitting, "float32 [num_tokens, in_features]"
        x, y = x.contiguous(), torch.empty(len(x), self.out_features)
        self.kernel(x.data_ptr(), y.data_ptr(), len(x), self.out_features, self.in_features, *self.pointers)
        return y


def quantize_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [out, in] → int8 of the same shape and float32 scales [out]; weight ≈ int8 * scale, symmetric."""
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    safe = torch.where(scales > 0, scales, 1.0)
    return (weight / safe[:, None]).round_().to(torch.int8), scales


def _pack_float(
    kernel: Callable[..., None], dtype: torch.dtype, weight: torch.Tensor, bias: torch.Tensor | None
) -> CppWeight:
    """Panels [out / 64, in, 64], the last one padded with zeros. The arithmetic is float32: weights of 16 bits become
    float32 in a register, which is exact."""
    narrow = weight.to(dtype)
    if dtype == torch.float16 and weight.dtype != dtype and not narrow.isfinite().all():
        raise ModelError(
            "weights=float16 cannot hold this checkpoint: it has a weight beyond 65504, float16's largest number; use "
            "auto"
        )
    panels = _padded(narrow, 1).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return CppWeight(kernel, weight.shape, panels, bias)


def _pack_int8(kernel: Callable[..., None], weight: torch.Tensor, bias: torch.Tensor | None) -> CppWeight:
    """Panels [out / 64, in / 4, 64, 4] of int8 by output channel; the scale of each channel; the sum of its weights.
    The kernel rounds activations to int8 by token (dynamic quantisation)."""
    if weight.shape[1] > LARGEST_INNER:
        raise ModelError(
            f"weights=int8 sums up to {LARGEST_INNER} products, and a layer of this model has {weight.shape[1]}; "
            "use float16"
        )
    quantised, scales = quantize_channels(weight)
    quantised = _padded(quantised, 4)
    panels = quantised.unflatten(1, (-1, 4)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    scales = F.pad(scales, (0, len(quantised) - len(scales)))
    return CppWeight(kernel, weight.shape, panels, scales, quantised.sum(1, dtype=torch.int32), bias)


def _padded(weight: torch.Tensor, inner: int) -> torch.Tensor:
    """Filled up with zeros to whole panels, and to a multiple of `inner` inputs."""
    return F.pad(weight, (0, -weight.shape[1] % inner, 0, -len(weight) % PANEL))


def _kernel(library: Library, name: str, num_pointers: int) -> Callable[..., None] | None:
    """A function of x, y, three sizes and pointers to the weight's parts; None where the machine has not got it."""
    try:
        return library.function(name, _POINTER, _POINTER, *_SIZES, *(_POINTER,) * num_pointers)
    except AttributeError:
        return None
