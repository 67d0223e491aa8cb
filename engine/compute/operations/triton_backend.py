"""The small operations of a decoder layer as Triton kernels, for GPUs."""

import torch

from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.operations import reference
from sojourn.engine.compute.operations.backend import Gate, HeadSpec, Norm, Operations, Rope
from sojourn.engine.compute.operations.reference import Experts
from sojourn.engine.compute.triton import experts as experts_kernels
from sojourn.engine.compute.triton import gate as gate_kernels
from sojourn.engine.compute.triton import gated_product as product_kernels
from sojourn.engine.compute.triton import heads as heads_kernels
from sojourn.engine.compute.triton import norms as norm_kernels

_NORMS = {reference.rms_norm: False, reference.gemma_rms_norm: True}  # whether it is Gemma's
_GATES = {  # their kinds in the kernels
    reference.silu_gate: gate_kernels.SILU.value,
    reference.gelu_gate: gate_kernels.GELU.value,
    reference.clamped_swish_gate: gate_kernels.CLAMPED.value,
}


class TritonOperations(Operations):
    """Norms and gates without a kernel are those of the reference. Nothing waits for the device."""

    def norm(self, kind: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if kind not in _NORMS:
            return super().norm(kind, x, weight, eps)
        return norm_kernels.norm(x, weight, eps, gemma=_NORMS[kind])

    def add_norm(
        self, kind: Norm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if kind not in _NORMS:
            return super().add_norm(kind, x, residual, weight, eps)
        return norm_kernels.add_norm(x, residual, weight, eps, gemma=_NORMS[kind])

    def gate(self, kind: Gate, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_kernels.gate(gate_up, _GATES[kind]) if kind in _GATES else kind(gate_up)

    def gated_product(self, kind: Gate, x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
        plain = gate_up.addition is None and gate_up.method is None and gate_up.bias is None and kind in _GATES
        if plain and product_kernels.fits(x, gate_up.weight):
            return product_kernels.gated_product(x, gate_up.weight, _GATES[kind])
        return super().gated_product(kind, x, gate_up)

    def write_heads(
        self, qkv: torch.Tensor, heads: HeadSpec, rope: Rope | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> torch.Tensor:
        return heads_kernels.write_heads(qkv, heads, rope, slots, layer_cache)

    def write(
        self, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> None:
        heads_kernels.write(key, value, slots, layer_cache)

    def mixture(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: Experts,
        down: Experts,
        kind: Gate = reference.silu_gate,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        elsewhere: bool = False,
    ) -> torch.Tensor:
        if not isinstance(gate_up, torch.Tensor) or kind not in _GATES:  # one method an expert
            return super().mixture(x, weights, experts, gate_up, down, kind, biases, elsewhere=elsewhere)
        return experts_kernels.mixture(
            x, weights, experts, gate_up, down, kind=_GATES[kind], biases=biases, elsewhere=elsewhere
        )
