"""Checkpoint formats that are written: how a matrix is rounded, its tensors, and what config.json says of it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.compute.quantisation.rounding import rounded_fp8, rounded_integers
from sojourn.engine.token.quantised.packing import awq_packed, packed

Tensors = dict[str, torch.Tensor]  # by suffix of the module's name
INT8, INT4, BYTES = 8, 4, 8


@dataclass(frozen=True, slots=True)
class Layout:
    """`group` is the inputs that share a scale; None: all of an output."""

    description: str
    grouped: bool
    rounded: Callable[[torch.Tensor, int | None], QuantisedMatrix]
    tensors: Callable[[QuantisedMatrix], Tensors]
    config: Callable[[int | None], dict[str, Any]]  # quantization_config
    outputs_divide_by: int = 1
    inputs_divide_by: int = 1


def _compressed(
    form: str, weights: dict[str, Any], group: int | None, activations: dict[str, Any] | None
) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    scheme = {"targets": ["Linear"], "weights": weights | strategy | {"symmetric": True, "dynamic": False}}
    if activations is not None:
        by_token = {"strategy": "token", "dynamic": True, "symmetric": True}
        scheme["input_activations"] = activations | by_token
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": scheme},
    }  # fmt: skip


def _plain(matrix: QuantisedMatrix) -> Tensors:
    return {".weight": matrix.codes, ".weight_scale": matrix.scales}


def _words(matrix: QuantisedMatrix) -> Tensors:
    shape = torch.tensor(matrix.shape)
    return {".weight_packed": packed(_unsigned(matrix), matrix.bits), ".weight_scale": matrix.scales.half(),
            ".weight_shape": shape}  # fmt: skip


def _unsigned(matrix: QuantisedMatrix) -> torch.Tensor:
    return (matrix.codes.to(torch.int16) + (1 << (matrix.bits - 1))).to(torch.uint8)


def _awq(matrix: QuantisedMatrix) -> Tensors:
    """Inputs by outputs, eight outputs to a word."""
    zeros = matrix.zeros.to(torch.uint8)
    return {".qweight": awq_packed(matrix.codes.T.contiguous()), ".qzeros": awq_packed(zeros.T.contiguous()),
            ".scales": matrix.scales.T.half()}  # fmt: skip


def _gptq(matrix: QuantisedMatrix) -> Tensors:
    """Eight inputs to a word; zeros less one, all alike; the groups in the order of inputs."""
    outputs, inputs = matrix.shape
    zeros = torch.full((inputs // matrix.group, outputs), (1 << (matrix.bits - 1)) - 1, dtype=torch.uint8)
    return {
        ".qweight": packed(_unsigned(matrix), matrix.bits).T, ".qzeros": packed(zeros, matrix.bits),
        ".scales": matrix.scales.T.half(), ".g_idx": (torch.arange(inputs) // matrix.group).to(torch.int32),
    }  # fmt: skip


def _symmetric(bits: int, activations: str | None, weight: torch.Tensor, group: int | None) -> QuantisedMatrix:
    return rounded_integers(weight, bits, group, activations=activations)


LAYOUTS: dict[str, Layout] = {
    "int8": Layout(
        "compressed-tensors, INT8 W8A8: one scale an output, activations by token", False,
        partial(_symmetric, INT8, "int8"), _plain,
        partial(_compressed, "int-quantized", {"num_bits": 8, "type": "int"},
                activations={"num_bits": 8, "type": "int"}),
    ),
    "fp8": Layout(
        "compressed-tensors, FP8 W8A8: one scale an output, activations by token", False,
        lambda weight, group: rounded_fp8(weight), _plain,
        partial(_compressed, "float-quantized", {"num_bits": 8, "type": "float"},
                activations={"num_bits": 8, "type": "float"}),
    ),
    "w4a16": Layout(
        "compressed-tensors, W4A16: symmetric codes of 4 bits in groups", True, partial(_symmetric, INT4, None), _words,
        partial(_compressed, "pack-quantized", {"num_bits": 4, "type": "int"}, activations=None),
    ),
    "awq": Layout(
        "AWQ's GEMM layout: codes of 4 bits with zeros, in groups", True,
        lambda weight, group: rounded_integers(weight, INT4, group, symmetric=False), _awq,
        lambda group: {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"},
        outputs_divide_by=8,
    ),
    "gptq": Layout(
        "GPTQ's layout: symmetric codes of 4 bits in groups, rounded to nearest", True,
        partial(_symmetric, INT4, None), _gptq,
        lambda group: {"quant_method": "gptq", "bits": 4, "group_size": group, "sym": True, "desc_act": False,
                       "checkpoint_format": "gptq"},
        outputs_divide_by=8, inputs_divide_by=8,
    ),
}  # fmt: skip
