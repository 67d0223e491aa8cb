"""FP8 checkpoints: DeepSeek's, with a scale for each block of 128 x 128, and those with one scale a matrix."""

import math
from functools import partial
from typing import Any

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.token.models.settings import count, listed
from sojourn.engine.token.quantised.scheme import Parts, WeightScheme, needed, outlined_matrix, scale_grid
from sojourn.engine.token.quantised.settings import skips, word
from sojourn.metrics.errors import ModelError

SUFFIXES = (".weight_scale_inv", ".weight_scale", ".input_scale", ".activation_scale")


def fp8(config: dict[str, Any]) -> WeightScheme:
    """quantization_config with quant_method fp8, or quant_algo FP8."""
    word(config, "fmt", ("e4m3",), "e4m3")
    sizes = listed(config, "weight_block_size")
    if sizes and len(sizes) != 2:
        raise ModelError(f"quantization_config has weight_block_size={sizes!r}; it must be two sizes")
    block = (count({"rows": sizes[0]}, "rows"), count({"columns": sizes[1]}, "columns")) if sizes else None
    static = config.get("activation_scheme", "dynamic") == "static"
    names = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
    left_out = ["lm_head", *(str(name).strip("*").strip(".") for key in names for name in listed(config, key))]
    return WeightScheme("fp8", SUFFIXES, partial(_matrix, block, static), partial(_outline, block, static, left_out))


def _matrix(block: tuple[int, int] | None, static: bool, module: str, tensors: Parts) -> QuantisedMatrix:
    """weight [out, in] float8_e4m3fn; weight_scale_inv (which multiplies, whatever its name) or weight_scale."""
    codes = needed(module, tensors, ".weight", torch.float8_e4m3fn)
    suffix = ".weight_scale_inv" if ".weight_scale_inv" in tensors else ".weight_scale"
    stored = needed(module, tensors, suffix, dim=None)
    scales, group = scale_grid(f"{module}{suffix}", stored, codes.shape, block)
    fixed = None
    if static:
        stored = tensors.get(".input_scale", tensors.get(".activation_scale"))
        if stored is None or stored.numel() != 1:
            raise ModelError(f"tensor {module}.input_scale is missing, or no single number, but activations are static")
        fixed = stored.float().reshape(())
    return QuantisedMatrix(codes, scales, None, group, 8, None, "fp8", fixed)


def _outline(
    block: tuple[int, int] | None, static: bool, left_out: list[str], module: str, outputs: int, inputs: int
) -> QuantisedMatrix | None:
    if skips(left_out, module):
        return None
    group = None if block is None else math.gcd(block[1], inputs)
    return outlined_matrix(outputs, inputs, torch.float8_e4m3fn, 8, group, activations="fp8", static=static)
