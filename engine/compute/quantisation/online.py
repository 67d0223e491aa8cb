"""Formats that dense weights are rounded to as they are loaded, for kernels of quantised matrices."""

from collections.abc import Callable
from functools import partial

import torch

from sojourn.engine.compute.quantisation.kernels import Kernels
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.compute.quantisation.method import LinearMethod
from sojourn.engine.compute.quantisation.rounding import GROUP, round_to_nearest, rounded_fp8, rounded_integers
from sojourn.engine.compute.weight_formats import WeightFormat
from sojourn.metrics.errors import ModelError


def online_formats(kernels: Kernels) -> dict[str, WeightFormat]:
    """Name → format, of those that a kernel of this device multiplies."""
    makers = {"int4": (round_to_nearest, 0.5 + 2 / GROUP), "int8": (_int8, 1.0), "fp8": (rounded_fp8, 1.0)}
    formats = {}
    for name, (rounded, size) in makers.items():
        if kernels.fitting(rounded(torch.zeros(64, 2 * GROUP))) is not None:
            formats[name] = WeightFormat(name, partial(_pack, kernels, name, rounded), bytes_per_weight=size)
    return formats


def _int8(weight: torch.Tensor) -> QuantisedMatrix:
    return rounded_integers(weight, 8, None, activations="int8")


def _pack(
    kernels: Kernels, name: str, rounded: Callable[[torch.Tensor], QuantisedMatrix], weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> LinearMethod:  # fmt: skip
    matrix = rounded(weight)
    kernel = kernels.fitting(matrix)
    if kernel is None:
        shape = list(weight.shape)
        raise ModelError(f"weights={name} has no kernel for a layer of shape {shape}; use another format")
    return kernel.make(matrix, bias)
