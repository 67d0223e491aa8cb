"""Formats of torch's own kernels, for machines without a C++ compiler or without AVX512."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.compute.weight_formats.cpp_formats import quantize_channels
from engine.compute.weight_formats.format import WeightFormat

ONEDNN_ROWS = 8  # of activations that a packed layout is chosen for: decoding

BATCH_DEPENDENT = (
    "weights=int8 runs in FBGEMM here, which has one scale for the activations of a whole step: what a request gets "
    "depends on the others beside it. A C++ compiler and a CPU with AVX512 VNNI would change that"
)


@dataclass(frozen=True, slots=True)
class TorchWeight:
    """A matrix that torch has packed, and the operation that multiplies by it."""

    multiply: Callable[[torch.Tensor], torch.Tensor]
    nbytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x)


def torch_formats() -> dict[str, WeightFormat]:
    """Name → format, of those that this build of torch has."""
    formats = {"float32": WeightFormat("float32", _float32)}
    if "fbgemm" in torch.backends.quantized.supported_engines:
        formats["float16"] = WeightFormat("float16", _float16)
        formats["int8"] = WeightFormat("int8", _int8, BATCH_DEPENDENT)
    return formats


def _float32(weight: torch.Tensor, bias: torch.Tensor | None) -> TorchWeight:
    """oneDNN's blocked layout has not got MKL's slow cases at 4 to 16 rows."""
    weight = weight.float()
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    if not torch.backends.mkldnn.is_available():
        return TorchWeight(lambda x: F.linear(x, weight, bias), nbytes)
    packed, linear = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS), torch.ops.mkldnn._linear_pointwise
    return TorchWeight(lambda x: linear(x, packed, bias, "none", [], ""), nbytes)


def _float16(weight: torch.Tensor, bias: torch.Tensor | None) -> TorchWeight:
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)  # saturates what float16 cannot hold
    multiply = torch.ops.quantized.linear_dynamic_fp16
    return TorchWeight(lambda x: multiply(x, packed), 2 * weight.numel() + (0 if bias is None else bias.nbytes))


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> TorchWeight:
    _, scales = quantize_channels(weight)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    scales = torch.where(scales > 0, scales, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but the only way into FBGEMM
        quantised = torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8)
    packed, multiply = torch.ops.quantized.linear_prepack(quantised, bias), torch.ops.quantized.linear_dynamic
    nbytes = weight.numel() + scales.nbytes + (0 if bias is None else bias.nbytes)
    return TorchWeight(lambda x: multiply(x, packed, True), nbytes)
