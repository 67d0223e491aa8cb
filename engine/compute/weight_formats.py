"""How a CPU holds the matrices of linear layers, and multiplies by them: a swap point.

Our own kernels (cpp/gemm_*.cpp) come first: a row's result never depends on other rows. torch's
kernels are for machines without a C++ compiler or without AVX512.
"""

import logging
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from sojourn.engine.compute.cpp.extension import Library, library, unavailable
from sojourn.engine.compute.cpp.matrices import (
    LARGEST_INNER,
    PANEL,
    CppWeight,
    groups_kernel,
    int8_kernel,
    matrix_kernel,
)
from sojourn.engine.compute.quantisation import cpu_groups
from sojourn.engine.compute.quantisation.method import LinearMethod
from sojourn.engine.compute.quantisation.rounding import GROUP, round_to_nearest
from sojourn.metrics.errors import ModelError

ONEDNN_ROWS = 8  # of activations that a packed layout is chosen for: decoding

BATCH_DEPENDENT = (
    "weights=int8 runs in FBGEMM here, which has one scale for the activations of a whole step: what a request gets "
    "depends on the others beside it. A C++ compiler and a CPU with AVX512 VNNI would change that"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to hold matrices. `pack` is given a weight [out_features, in_features] and a float32 bias or None."""

    name: str
    pack: Callable[[torch.Tensor, torch.Tensor | None], LinearMethod]
    caveat: str | None = None  # a promise of the other formats that this one breaks, as a sentence
    bytes_per_weight: float = 4  # with the scales of groups, without those of outputs and without padding


def weight_format(name: str, stored: torch.dtype) -> WeightFormat:
    """The format of EngineConfig.weights on this machine, for a checkpoint that stores its matrices as `stored`.

    `auto` keeps what is stored and multiplies in float32: exact, and since a step of few rows is bound by reading the
    weights, 16-bit checkpoints run about twice as fast as in float32 and never slower (bench/kernels/linear.py,
    docs/results/performance.md). Without our kernels it is float32, but for float16 checkpoints where torch has FBGEMM.
    float16 rounds what is not stored so; int8 rounds weights by channel and activations by token, int4 both by groups
    of inputs. Raises ModelError.
    """
    formats = torch_formats()
    if (kernels := library()) is not None:
        formats |= cpp_formats(kernels)
    if name == "auto":
        name = str(stored).removeprefix("torch.")
        return formats.get(name, formats["float32"]) if name in ("bfloat16", "float16") else formats["float32"]
    if name not in formats:
        reason = unavailable() or "this CPU lacks AVX512, or for int8 and int4 its VNNI"
        raise ModelError(f"weights={name} has no kernel here: {reason}, and this torch has no FBGEMM; use float32")
    chosen = formats[name]
    if chosen.caveat:
        log.warning("%s", chosen.caveat)
    return chosen


def has_bfloat16() -> bool:
    """Whether this CPU multiplies in bfloat16. An x86 that does not has to convert: on a Cascade Lake Xeon torch's
    products of 8 rows and more were slower than in float32, those of 64 four to five times. Others are not known."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def cpp_formats(library: Library) -> dict[str, WeightFormat]:
    """Name → format, of those that this machine's instructions allow: AVX512, and its VNNI for int8 and int4."""
    formats = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        if (kernel := matrix_kernel(library, f"linear_{name}", 2)) is not None:
            formats[name] = WeightFormat(name, partial(_pack_float, kernel, dtype), bytes_per_weight=dtype.itemsize)
    if (kernel := int8_kernel(library)) is not None:
        formats["int8"] = WeightFormat("int8", partial(_pack_int8, kernel), bytes_per_weight=1)
    if (kernel := groups_kernel(library)) is not None:
        formats["int4"] = WeightFormat("int4", partial(_pack_int4, kernel), bytes_per_weight=0.5 + 2 / GROUP)
    return formats


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
    return CppWeight(kernel, weight.shape, _unpacked_float, panels, bias)


def _unpacked_float(panels: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return panels.float().transpose(1, 2).flatten(0, 1)


def _pack_int8(kernel: Callable[..., None], weight: torch.Tensor, bias: torch.Tensor | None) -> CppWeight:
    """The kernel rounds activations to int8 by token (dynamic quantisation)."""
    if weight.shape[1] > LARGEST_INNER:
        raise ModelError(
            f"weights=int8 sums up to {LARGEST_INNER} products, and a layer of this model has {weight.shape[1]}; "
            "use float16"
        )
    return pack_int8_codes(kernel, *quantize_channels(weight), bias)


def _pack_int4(kernel: Callable[..., None], weight: torch.Tensor, bias: torch.Tensor | None) -> CppWeight:
    """The kernel rounds activations to int8 by token and group."""
    matrix = round_to_nearest(weight)
    if not cpu_groups.fits(matrix):
        raise ModelError(
            f"weights=int4 rounds groups of up to {LARGEST_INNER} inputs, and a layer of this model has "
            f"{weight.shape[1]}, which no smaller group divides; use int8"
        )
    return cpu_groups.pack(kernel, matrix, bias)


def pack_int8_codes(
    kernel: Callable[..., None], codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> CppWeight:
    """Panels [out / 64, in / 4, 64, 4] of int8 codes [out, in]; the scale of each output; the sum of its codes."""
    quantised = _padded(codes, 4)
    panels = quantised.unflatten(1, (-1, 4)).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    scales = F.pad(scales, (0, len(quantised) - len(scales)))
    sums = quantised.sum(1, dtype=torch.int32)
    return CppWeight(kernel, codes.shape, _unpacked_int8, panels, scales, sums, bias)


def _unpacked_int8(
    panels: torch.Tensor, scales: torch.Tensor, sums: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return panels.transpose(1, 2).flatten(2).flatten(0, 1).float() * scales[:, None]


def _padded(weight: torch.Tensor, inner: int) -> torch.Tensor:
    """Filled up with zeros to whole panels, and to a multiple of `inner` inputs."""
    missing = (0, -weight.shape[1] % inner, 0, -len(weight) % PANEL)
    return F.pad(weight, missing) if any(missing) else weight  # which F.pad would copy


@dataclass(frozen=True, slots=True)
class TorchWeight:
    """A matrix that torch has packed, the operation that multiplies by it, and the one that unpacks it."""

    out_features: int
    in_features: int
    nbytes: int
    multiply: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[], torch.Tensor]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x)

    def dequantised(self) -> torch.Tensor:
        return self.unpack()


def torch_formats() -> dict[str, WeightFormat]:
    """Name → format, of those that this build of torch has."""
    formats = {"float32": WeightFormat("float32", _float32)}
    if "fbgemm" in torch.backends.quantized.supported_engines:
        formats["float16"] = WeightFormat("float16", _float16, bytes_per_weight=2)
        formats["int8"] = WeightFormat("int8", _int8, BATCH_DEPENDENT, bytes_per_weight=1)
    return formats


def _float32(weight: torch.Tensor, bias: torch.Tensor | None) -> TorchWeight:
    """oneDNN's blocked layout avoids MKL's slow cases at 4 to 16 rows."""
    weight = weight.float()
    nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)
    if not torch.backends.mkldnn.is_available():
        return TorchWeight(*weight.shape, nbytes, lambda x: F.linear(x, weight, bias), lambda: weight)
    packed, linear = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_ROWS), torch.ops.mkldnn._linear_pointwise
    return TorchWeight(*weight.shape, nbytes, lambda x: linear(x, packed, bias, "none", [], ""), packed.to_dense)


def _float16(weight: torch.Tensor, bias: torch.Tensor | None) -> TorchWeight:
    packed = torch.ops.quantized.linear_prepack_fp16(weight.float(), bias)  # saturates what float16 cannot hold
    multiply = torch.ops.quantized.linear_dynamic_fp16
    nbytes = 2 * weight.numel() + (0 if bias is None else bias.nbytes)
    unpack = torch.ops.quantized.linear_unpack_fp16
    return TorchWeight(*weight.shape, nbytes, lambda x: multiply(x, packed), lambda: unpack(packed)[0])


def _int8(weight: torch.Tensor, bias: torch.Tensor | None) -> TorchWeight:
    _, scales = quantize_channels(weight)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    scales = torch.where(scales > 0, scales, 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, but the only way into FBGEMM
        quantised = torch.quantize_per_channel(weight.float(), scales, zeros, 0, torch.qint8)
    packed, multiply = torch.ops.quantized.linear_prepack(quantised, bias), torch.ops.quantized.linear_dynamic
    nbytes = weight.numel() + scales.nbytes + (0 if bias is None else bias.nbytes)
    unpack = torch.ops.quantized.linear_unpack
    return TorchWeight(
        *weight.shape, nbytes, lambda x: multiply(x, packed, True), lambda: unpack(packed)[0].dequantize()
    )
