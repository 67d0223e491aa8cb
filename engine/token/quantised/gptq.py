"""GPTQ checkpoints (Frantar et al., 2022; AutoGPTQ and GPTQModel), with or without activation order."""

from functools import partial
from typing import Any

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.token.models.settings import section
from sojourn.engine.token.quantised.packing import unpacked
from sojourn.engine.token.quantised.scheme import Parts, WeightScheme, expect_shape, needed, num_groups, outlined_matrix
from sojourn.engine.token.quantised.settings import bits_of, group_of, word
from sojourn.metrics.errors import ModelError

# Version 1 stores zeros less one, a word at a time: what borrowed from the next code gets it back by this sum.
ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


def gptq(config: dict[str, Any]) -> WeightScheme:
    """quantization_config with quant_method gptq."""
    bits, group = bits_of(config, (2, 3, 4, 8)), group_of(config)
    key = "checkpoint_format" if config.get("checkpoint_format") else "format"
    layout = word(config, key, ("gptq", "gptq_v2"), "gptq")
    for rule, change in section(config, "dynamic").items():
        if change and not str(rule).startswith("-:"):
            raise ModelError(f"quantization_config has dynamic settings for {rule!r}; one setting for all is supported")
    symmetric, head = bool(config.get("sym", True)), bool(config.get("lm_head"))
    return WeightScheme(
        layout,
        (".qweight", ".qzeros", ".scales", ".g_idx"),
        partial(_matrix, bits, group, symmetric, layout == "gptq"),
        partial(_outline, bits, group, symmetric, head),
    )


def _matrix(bits: int, group: int | None, symmetric: bool, less_one: bool, module: str, tensors: Parts):
    """qweight [in * bits / 32, out], qzeros [in / group, out * bits / 32] int32; scales [in / group, out]; g_idx [in],
    the group of each input. weight = (q - z) * s."""
    qweight = needed(module, tensors, ".qweight", torch.int32)
    qzeros = needed(module, tensors, ".qzeros", torch.int32)
    scales = needed(module, tensors, ".scales")
    words, outputs = qweight.shape
    inputs = words * 32 // bits
    group = group or inputs
    groups = num_groups(module, inputs, group)
    expect_shape(f"{module}.scales", scales, groups, outputs)
    expect_shape(f"{module}.qzeros", qzeros, groups, -(-outputs * bits // 32))
    codes = unpacked(qweight.T, bits, inputs)
    zeros = _zeros(qzeros, bits, outputs, less_one)
    order = None
    if ".g_idx" in tensors:
        order = input_order(f"{module}.g_idx", needed(module, tensors, ".g_idx", dim=1), inputs, group)
        codes = codes if order is None else codes[:, order.to(codes.device)].contiguous()
    middle = 1 << (bits - 1)
    scales = scales.T.float().contiguous()
    if not symmetric:
        return QuantisedMatrix(codes, scales, zeros.T.float().contiguous(), group, bits, order)
    if not zeros.is_meta and not (zeros == middle).all():
        raise ModelError(
            f"tensor {module}.qzeros has other zeros than {middle}, but quantization_config says sym=true; "
            "its checkpoint_format may be wrong"
        )
    return QuantisedMatrix((codes - middle).view(torch.int8), scales, None, group, bits, order)


def _zeros(qzeros: torch.Tensor, bits: int, outputs: int, less_one: bool) -> torch.Tensor:
    """[in / group, out] uint8."""
    if not less_one:
        return unpacked(qzeros, bits, outputs)
    if bits in ONES:
        return unpacked(qzeros + ONES[bits], bits, outputs)
    return (unpacked(qzeros, bits, outputs) + 1) & ((1 << bits) - 1)


def input_order(name: str, groups: torch.Tensor, inputs: int, group: int) -> torch.Tensor | None:
    """The order that puts the inputs of a group side by side: [in] group numbers → [in] int64; None if they are."""
    expect_shape(name, groups, inputs)
    if groups.is_meta:
        return torch.empty(inputs, dtype=torch.int64, device="meta")
    groups, expected = groups.long(), torch.arange(inputs, device=groups.device) // group
    if torch.equal(groups, expected):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order], expected):
        raise ModelError(f"tensor {name} does not give each group {group} inputs; the checkpoint is damaged")
    return order


def _outline(
    bits: int, group: int | None, symmetric: bool, head: bool, module: str, outputs: int, inputs: int
) -> QuantisedMatrix | None:
    if module == "lm_head" and not head:
        return None
    dtype = torch.int8 if symmetric else torch.uint8
    return outlined_matrix(outputs, inputs, dtype, bits, group, zeros=not symmetric)
