"""AWQ checkpoints in the GEMM layout (Lin et al., 2023; AutoAWQ)."""

from functools import partial
from typing import Any

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.token.models.settings import listed
from sojourn.engine.token.quantised.packing import awq_unpacked
from sojourn.engine.token.quantised.scheme import Parts, WeightScheme, expect_shape, needed, num_groups, outlined_matrix
from sojourn.engine.token.quantised.settings import bits_of, group_of, skips
from sojourn.metrics.errors import ModelError


def awq(config: dict[str, Any]) -> WeightScheme:
    """quantization_config with quant_method awq."""
    bits_of(config, (4,), key="bits" if config.get("bits") is not None else "w_bit")
    group = group_of(config, "group_size" if config.get("group_size") is not None else "q_group_size")
    layout = str(config.get("version") or config.get("format") or "gemm").lower()
    if layout != "gemm":
        raise ModelError(f"quantization_config has version={layout!r}; of AWQ only the layout gemm is supported")
    left_out = [*listed(config, "modules_to_not_convert"), "lm_head"]
    return WeightScheme(
        "awq", (".qweight", ".qzeros", ".scales"), partial(_matrix, group), partial(_outline, group, left_out)
    )


def _matrix(group: int | None, module: str, tensors: Parts) -> QuantisedMatrix:
    """qweight [in, out / 8], qzeros [in / group, out / 8] int32; scales [in / group, out]. weight = (q - z) * s."""
    qweight = needed(module, tensors, ".qweight", torch.int32)
    qzeros = needed(module, tensors, ".qzeros", torch.int32)
    scales = needed(module, tensors, ".scales")
    inputs, outputs = qweight.shape[0], 8 * qweight.shape[1]
    group = group or inputs
    groups = num_groups(module, inputs, group)
    expect_shape(f"{module}.scales", scales, groups, outputs)
    expect_shape(f"{module}.qzeros", qzeros, groups, outputs // 8)
    zeros = awq_unpacked(qzeros).T.float().contiguous()
    codes = awq_unpacked(qweight).T.contiguous()
    return QuantisedMatrix(codes, scales.T.float().contiguous(), zeros, group, 4)


def _outline(group: int | None, left_out: list[str], module: str, outputs: int, inputs: int) -> QuantisedMatrix | None:
    if skips(left_out, module) or outputs % 8:
        return None
    return outlined_matrix(outputs, inputs, torch.uint8, 4, group, zeros=True)
