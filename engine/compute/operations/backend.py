"""The small operations of a decoder layer, between its matrix products: a swap point."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.compute.attention.backend import AttentionBackend
from engine.compute.heads import HeadSpec, Rope
from engine.compute.kv_cache import LayerCache
from engine.compute.operations.reference import Experts

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # reference.rms_norm or another norm
Gate = Callable[[torch.Tensor], torch.Tensor]  # reference.silu_gate or another gate


class Operations(Protocol):
    """What a layer computes besides matrix products and attention.

    Results may stand in memory that a later call of the same operation writes again; `residual` may be overwritten.
    """

    def norm(self, kind: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[num_tokens, size] → the same shape."""
        ...

    def add_norm(
        self, kind: Norm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of residual + x, and residual + x."""
        ...

    def gate(self, kind: Gate, gate_up: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * size] → [num_tokens, size]."""
        ...

    def write_heads(
        self, qkv: torch.Tensor, heads: HeadSpec, rope: Rope | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> torch.Tensor:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] → queries [num_tokens, num_heads, head_dim].

        Queries and keys are normalised and rotated as `heads` and `rope` say. Keys and values go to `slots`
        [num_tokens] of the cache; slot -1 is nowhere.
        """
        ...

    def write(
        self, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> None:
        """key and value [num_tokens, num_kv_heads, dim] → the cache; value is None where the layout has one plane."""
        ...

    def mixture(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: Experts, down: Experts
    ) -> torch.Tensor:
        """The mixture of each token's experts, gated by SiLU, with the shapes of reference.mixture."""
        ...


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of all layers of one forward pass, besides their hidden states."""

    operations: Operations
    attention: AttentionBackend
    slots: torch.Tensor  # [num_tokens] int64
    rope: Rope | None = None
