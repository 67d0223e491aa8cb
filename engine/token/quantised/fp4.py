"""Numbers of four bits (e2m1) with a scale for each few: MXFP4, NVFP4 (OCP Microscaling Formats; NVIDIA)."""

from functools import partial
from typing import Any

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.token.models.settings import listed
from sojourn.engine.token.quantised.packing import e2m1_codes, e8m0_scales
from sojourn.engine.token.quantised.scheme import Parts, WeightScheme, expect_shape, needed, outlined_matrix
from sojourn.engine.token.quantised.settings import skips
from sojourn.metrics.errors import ModelError

MX_GROUP, NV_GROUP = 32, 16


def mxfp4_matrix(module: str, octets: torch.Tensor, tensors: Parts) -> QuantisedMatrix:
    """octets [out, in / 2] uint8, weight_scale [out, in / 32] uint8: exponents."""
    exponents = needed(module, tensors, ".weight_scale", torch.uint8)
    return _matrix(module, octets, e8m0_scales(exponents), MX_GROUP)


def nvfp4_matrix(module: str, octets: torch.Tensor, tensors: Parts) -> QuantisedMatrix:
    """octets [out, in / 2] uint8, weight_scale [out, in / 16] float8; the global scale divides (compressed-tensors'
    weight_global_scale) or multiplies (ModelOpt's weight_scale_2)."""
    scales = needed(module, tensors, ".weight_scale", torch.float8_e4m3fn).float()
    if ".weight_global_scale" in tensors:
        scales = scales / tensors[".weight_global_scale"].float().reshape(-1)[:1]
    elif ".weight_scale_2" in tensors:
        scales = scales * tensors[".weight_scale_2"].float().reshape(-1)[:1]
    else:
        needed(module, tensors, ".weight_global_scale")
    return _matrix(module, octets, scales, NV_GROUP)


def _matrix(module: str, octets: torch.Tensor, scales: torch.Tensor, group: int) -> QuantisedMatrix:
    if octets.dtype != torch.uint8 or octets.dim() != 2:
        raise ModelError(f"a weight of {module} is {octets.dtype} with {octets.dim()} dimensions; expected is uint8")
    codes = e2m1_codes(octets)
    expect_shape(f"{module}.weight_scale", scales, codes.shape[0], codes.shape[1] // group)
    return QuantisedMatrix(codes, scales.contiguous(), None, group, 4)


def mxfp4(config: dict[str, Any]) -> WeightScheme:
    """quantization_config with quant_method mxfp4 (gpt-oss): stacked experts, the others stay."""
    left_out = [str(name) for name in listed(config, "modules_to_not_convert")]
    return WeightScheme("mxfp4", ("_blocks", "_scales"), _stacked, partial(_stacked_outline, left_out), weight="")


def _stacked(module: str, tensors: Parts) -> QuantisedMatrix:
    """_blocks [experts, out, in / 32, 16] uint8 and _scales [experts, out, in / 32] → codes [experts, out, in]."""
    blocks = needed(module, tensors, "_blocks", torch.uint8, dim=4)
    exponents = needed(module, tensors, "_scales", torch.uint8, dim=3)
    if blocks.shape[3] != MX_GROUP // 2:
        raise ModelError(f"tensor {module}_blocks has blocks of {blocks.shape[3]} bytes, expected {MX_GROUP // 2}")
    expect_shape(f"{module}_scales", exponents, *blocks.shape[:3])
    return QuantisedMatrix(e2m1_codes(blocks.flatten(2)), e8m0_scales(exponents), None, MX_GROUP, 4)


def _stacked_outline(left_out: list[str], module: str, outputs: int, inputs: int) -> QuantisedMatrix | None:
    if ".experts." not in module or skips(left_out, module) or inputs % MX_GROUP:
        return None
    return outlined_matrix(outputs, inputs, torch.float8_e4m3fn, 4, MX_GROUP)


def modelopt_nvfp4(config: dict[str, Any]) -> WeightScheme:
    """quantization_config with quant_algo NVFP4 (ModelOpt): weight uint8, weight_scale, weight_scale_2."""
    left_out = [
        str(name).strip("*").strip(".") for key in ("ignore", "exclude_modules") for name in listed(config, key)
    ]
    return WeightScheme(
        "nvfp4", (".weight_scale", ".weight_scale_2", ".input_scale"), _modelopt, partial(_outline, left_out)
    )


def _modelopt(module: str, tensors: Parts) -> QuantisedMatrix:
    return nvfp4_matrix(module, needed(module, tensors, ".weight", torch.uint8), tensors)


def _outline(left_out: list[str], module: str, outputs: int, inputs: int) -> QuantisedMatrix | None:
    if module == "lm_head" or skips(left_out, module):
        return None
    return outlined_matrix(outputs, inputs, torch.float8_e4m3fn, 4, NV_GROUP)
