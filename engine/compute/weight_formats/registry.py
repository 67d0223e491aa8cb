"""Which format a CPU's weights get: the registry."""

import logging
import platform

import torch

from engine.compute.cpp.extension import library, unavailable
from engine.compute.weight_formats.cpp_formats import cpp_formats
from engine.compute.weight_formats.format import WeightFormat
from engine.compute.weight_formats.torch_formats import torch_formats
from metrics.errors import ModelError

log = logging.getLogger(__name__)


def weight_format(name: str, stored: torch.dtype) -> WeightFormat:
    """The format of EngineConfig.weights on this machine, for a checkpoint that stores its matrices as `stored`.

    `auto` keeps what is stored and multiplies in float32: exact, and since a step of few rows is bound by reading the
    weights, 16-bit checkpoints run about twice as fast as in float32 and never slower (bench/kernels/linear.py,
    docs/performance.md). Without our kernels it is float32, but for checkpoints in float16 where torch has FBGEMM.
    float16 rounds what is not stored so; int8 rounds weights by channel and activations by token. Raises
    ModelError.
    """
    formats = torch_formats()
    if (kernels := library()) is not None:
        formats |= cpp_formats(kernels)
    if name == "auto":
        name = str(stored).removeprefix("torch.")
        return formats.get(name, formats["float32"]) if name in ("bfloat16", "float16") else formats["float32"]
    if name not in formats:
        reason = unavailable() or "this CPU lacks AVX512, or for int8 its VNNI"
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
