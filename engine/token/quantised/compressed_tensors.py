"""compressed-tensors checkpoints (llm-compressor): integers of 2 to 8 bits, FP8, MXFP4, MXFP8, NVFP4."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.token.models.settings import count, listed, section
from sojourn.engine.token.quantised.fp4 import mxfp4_matrix, nvfp4_matrix
from sojourn.engine.token.quantised.gptq import input_order
from sojourn.engine.token.quantised.packing import e8m0_scales, unpacked
from sojourn.engine.token.quantised.scheme import (
    Parts,
    WeightScheme,
    expect_shape,
    needed,
    outlined_matrix,
    scale_grid,
)
from sojourn.engine.token.quantised.settings import bits_of, matches, word
from sojourn.metrics.errors import ModelError

SUFFIXES = (
    ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_shape", ".weight_g_idx", ".weight_global_scale",
    ".input_scale", ".input_zero_point", ".input_global_scale",
)  # fmt: skip
ROUNDED = {"int": "int8", "float": "fp8"}  # activations of 8 bits
STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")


@dataclass(frozen=True, slots=True)
class Group:
    """One of `config_groups`: which modules, and how their weights are stored."""

    targets: list[str]
    bits: int
    is_float: bool
    symmetric: bool
    group_size: int | None  # None: one scale for all inputs of an output
    block: tuple[int, int] | None
    activations: str | None  # int8, fp8; None: kept as they are
    static: bool  # the checkpoint has a scale for activations


def compressed_tensors(config: dict[str, Any]) -> WeightScheme:
    """quantization_config with quant_method compressed-tensors."""
    for key, meaning in (("sparsity_config", "sparse weights"), ("transform_config", "transforms of activations")):
        if (extra := section(config, key)) and extra.get("format") != "dense":
            raise ModelError(f"quantization_config has {key}: {meaning} are not supported")
    groups = [_group(section(config["config_groups"], name)) for name in section(config, "config_groups")]
    if not groups:
        raise ModelError("quantization_config has no config_groups, so it says of no layer how it is quantised")
    ignored = [str(name) for name in listed(config, "ignore")]
    return WeightScheme("compressed-tensors", SUFFIXES, partial(_matrix, groups), partial(_outline, groups, ignored))


def _group(config: dict[str, Any]) -> Group:
    weights, inputs = section(config, "weights"), section(config, "input_activations")
    if not weights:
        raise ModelError("quantization_config has a group without weights; only quantised weights are supported")
    if section(config, "output_activations"):
        raise ModelError("quantization_config has output_activations: rounded outputs are not supported")
    kind = word(weights, "type", ("int", "float"), "int")
    by_default = "group" if weights.get("group_size") not in (None, -1) else "channel"
    strategy = word(weights, "strategy", STRATEGIES, by_default)
    grouped = strategy in ("group", "tensor_group") and weights.get("group_size") != -1
    block = tuple(count({"block": size}, "block") for size in listed(weights, "block_structure")) or None
    if (strategy == "block") != (block is not None and len(block) == 2):
        raise ModelError(
            "quantization_config has strategy=block without a block_structure of two sizes, or the reverse"
        )
    narrow = inputs.get("num_bits") == 8
    return Group(
        targets=listed(config, "targets"),
        bits=bits_of(weights, (4, 8) if kind == "float" else tuple(range(2, 9)), key="num_bits"),
        is_float=kind == "float",
        symmetric=bool(weights.get("symmetric", True)),
        group_size=count(weights, "group_size") if grouped else None,
        block=block,
        activations=ROUNDED[word(inputs, "type", ROUNDED, "int")] if narrow else None,
        static=narrow and inputs.get("dynamic") is False,
    )


def _of_module(groups: list[Group], module: str) -> Group | None:
    """The group of a module: one that names it comes before one that names its class."""
    by_name = (group for group in groups if matches([t for t in group.targets if t != "Linear"], module))
    by_class = (group for group in groups if "Linear" in group.targets)
    return next(by_name, None) or next(by_class, None)


def _matrix(groups: list[Group], module: str, tensors: Parts) -> QuantisedMatrix:
    group = _of_module(groups, module)
    if group is None:
        raise ModelError(f"tensor {module}{min(tensors)} is of a layer that no target of quantization_config names")
    if group.is_float and group.bits == 4:
        make = nvfp4_matrix if ".weight_global_scale" in tensors else mxfp4_matrix
        return make(module, needed(module, tensors, ".weight_packed"), tensors)
    read: Callable[[Group, str, Parts], QuantisedMatrix] = _packed if ".weight_packed" in tensors else _plain
    return read(group, module, tensors)


def _packed(group: Group, module: str, tensors: Parts) -> QuantisedMatrix:
    """weight_packed [out, in * bits / 32] int32, of codes above the least one; zeros are packed along the outputs."""
    words = needed(module, tensors, ".weight_packed", torch.int32)
    scales = needed(module, tensors, ".weight_scale")
    outputs = words.shape[0]
    inputs = _inputs(group, module, tensors, words.shape[1], scales)
    codes = unpacked(words, group.bits, inputs)
    scales, size = scale_grid(f"{module}.weight_scale", scales, codes.shape)
    _expect_group(group, module, size, inputs)
    order = None
    if ".weight_g_idx" in tensors:
        order = input_order(f"{module}.weight_g_idx", needed(module, tensors, ".weight_g_idx", dim=1), inputs, size)
        codes = codes if order is None else codes[:, order.to(codes.device)].contiguous()
    if group.symmetric:
        codes = (codes - (1 << (group.bits - 1))).view(torch.int8)
        return QuantisedMatrix(codes, scales, None, size, group.bits, order, *_activations(group, module, tensors))
    packed_zeros = needed(module, tensors, ".weight_zero_point", torch.int32)
    expect_shape(f"{module}.weight_zero_point", packed_zeros, -(-outputs * group.bits // 32), scales.shape[1])
    zeros = unpacked(packed_zeros.T, group.bits, outputs).T.float().contiguous()
    return QuantisedMatrix(codes, scales, zeros, size, group.bits, order, *_activations(group, module, tensors))


def _inputs(group: Group, module: str, tensors: Parts, words: int, scales: torch.Tensor) -> int:
    """How many inputs the words hold: the last one may be filled up."""
    fitting = words * 32 // group.bits
    shape = tensors.get(".weight_shape")
    inputs = scales.shape[1] * group.group_size if group.group_size else fitting
    if shape is not None and not shape.is_meta:
        inputs = int(shape.flatten()[-1]) if shape.numel() == 2 else -1
    if not 0 < inputs <= fitting or -(-inputs * group.bits // 32) != words:
        raise ModelError(f"tensor {module}.weight_packed has {words} words a row, which do not hold {inputs} inputs")
    return inputs


def _plain(group: Group, module: str, tensors: Parts) -> QuantisedMatrix:
    """weight [out, in] int8 or float8_e4m3fn; weight_scale of the whole, of outputs, of groups or of blocks."""
    codes = needed(module, tensors, ".weight", torch.float8_e4m3fn if group.is_float else torch.int8)
    stored = needed(module, tensors, ".weight_scale", dim=None)
    if stored.dtype == torch.uint8:
        stored = e8m0_scales(stored)
    scales, size = scale_grid(f"{module}.weight_scale", stored, codes.shape, group.block)
    if group.block is None:
        _expect_group(group, module, size, codes.shape[1])
    zeros = None
    if not group.symmetric:
        stored = needed(module, tensors, ".weight_zero_point", dim=None)
        zeros, _ = scale_grid(f"{module}.weight_zero_point", stored, codes.shape, group.block)
    return QuantisedMatrix(codes, scales, zeros, size, group.bits, None, *_activations(group, module, tensors))


def _expect_group(group: Group, module: str, size: int, inputs: int) -> None:
    expected = group.group_size or inputs
    if size != expected:
        raise ModelError(
            f"tensor {module}.weight_scale has a scale for each {size} inputs, but quantization_config says {expected}"
        )


def _activations(group: Group, module: str, tensors: Parts) -> tuple[str | None, torch.Tensor | None]:
    if not group.static:
        return group.activations, None
    scale = tensors.get(".input_scale")
    if scale is None or scale.numel() != 1:
        raise ModelError(f"tensor {module}.input_scale is missing, or no single number, but activations are static")
    return group.activations, scale.float().reshape(())


def _outline(groups: list[Group], ignored: list[str], module: str, outputs: int, inputs: int) -> QuantisedMatrix | None:
    group = None if matches(ignored, module) else _of_module(groups, module)
    if group is None:
        return None
    dtype = torch.float8_e4m3fn if group.is_float else torch.int8
    zeros = not group.symmetric
    if zeros and group.bits < 8:
        dtype = torch.uint8
    size = group.group_size if group.block is None else math.gcd(group.block[1], inputs)
    return outlined_matrix(
        outputs, inputs, dtype, group.bits, size, zeros=zeros, activations=group.activations, static=group.static
    )
