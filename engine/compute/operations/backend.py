"""The small operations of a decoder layer, between its matrix products: a swap point. The reference is in torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.kv_formats import quantise
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.operations.reference import Experts, mixture, rms_norm, rotate, silu_gate

Norm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]  # reference.rms_norm or another norm
Gate = Callable[[torch.Tensor], torch.Tensor]  # reference.silu_gate or another gate


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How a row of fused queries, keys and values is made of heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    q_norm: torch.Tensor | None = None  # [head_dim], with k_norm: each head's root-mean-square norm
    k_norm: torch.Tensor | None = None
    norm: Norm = rms_norm  # of which kind they are


@dataclass(slots=True)
class Rope:
    """The angles of one step: the tables of all positions, and the positions."""

    cos: torch.Tensor  # [max_len, 1, head_dim]
    sin: torch.Tensor
    positions: torch.Tensor  # [num_tokens] int64
    _rows: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each token, [num_tokens, 1, head_dim], gathered once for all layers."""
        if self._rows is None:
            self._rows = self.cos[self.positions], self.sin[self.positions]
        return self._rows


class Operations:
    """What a layer computes besides matrix products and attention. Here one torch operation after the other, on any
    device; a backend overrides what it has a kernel for.

    Results may stand in memory that a later call of the same operation writes again; `residual` may be overwritten.
    """

    def norm(self, kind: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """[num_tokens, size] → the same shape."""
        return kind(x, weight, eps)

    def add_norm(
        self, kind: Norm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of residual + x, and residual + x."""
        total = residual + x
        return kind(total, weight, eps), total

    def gate(self, kind: Gate, gate_up: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * size] → [num_tokens, size]."""
        return kind(gate_up)

    def gated_product(self, kind: Gate, x: torch.Tensor, gate_up: Linear) -> torch.Tensor:
        """The gate of gate_up(x): [num_tokens, hidden_size] → [num_tokens, size]."""
        return self.gate(kind, gate_up(x))

    def write_heads(
        self, qkv: torch.Tensor, heads: HeadSpec, rope: Rope | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> torch.Tensor:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] → queries [num_tokens, num_heads, head_dim].

        Queries and keys are normalised and rotated as `heads` and `rope` say. Keys and values go to `slots`
        [num_tokens] of the cache; slot -1 is nowhere.
        """
        sizes = [count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
        query, key, value = (part.unflatten(-1, (-1, heads.head_dim)) for part in qkv.split(sizes, dim=-1))
        if heads.q_norm is not None:
            query = heads.norm(query, heads.q_norm, heads.norm_eps)
            key = heads.norm(key, heads.k_norm, heads.norm_eps)
        if rope is not None:
            query, key = rotate(query, *rope.rows()), rotate(key, *rope.rows())
        self.write(key, value, slots, layer_cache)
        return query

    def write(
        self, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> None:
        """key and value [num_tokens, num_kv_heads, dim] → the cache; value is None where the layout has one plane."""
        if slots.is_cpu and (slots < 0).any():  # not on a GPU, which would have to wait: there, no row is padding
            real = slots >= 0
            key, value, slots = key[real], None if value is None else value[real], slots[real]
        block_size = layer_cache.values.shape[2]
        places = slots // block_size, slots % block_size
        for plane, vectors in enumerate((key,) if value is None else (key, value)):
            if layer_cache.scales is None:
                layer_cache.values[plane].index_put_(places, vectors)
            else:
                stored, scales = quantise(vectors, layer_cache.values.dtype)
                layer_cache.values[plane].view(torch.uint8).index_put_(places, stored.view(torch.uint8))
                layer_cache.scales[plane].index_put_(places, scales)

    def mixture(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        gate_up: Experts,
        down: Experts,
        kind: Gate = silu_gate,
        biases: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        elsewhere: bool = False,
    ) -> torch.Tensor:
        """The mixture of each token's experts, gated by `kind`, with the shapes of reference.mixture."""
        return mixture(
            x, weights, experts, gate_up, down, lambda both: self.gate(kind, both), biases, elsewhere=elsewhere
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The inputs of all layers of one forward pass, besides their hidden states."""

    operations: Operations
    attention: AttentionBackend
    slots: torch.Tensor  # [num_tokens] int64
    rope: Rope | None = None
