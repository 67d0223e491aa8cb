"""The small operations of a decoder layer in torch: the reference. Runs on any device."""

import torch

from engine.compute.heads import HeadSpec, Rope
from engine.compute.kv_cache import LayerCache, quantise
from engine.compute.operations.backend import Gate, Norm
from engine.compute.operations.reference import Experts, mixture, rms_norm, rotate, silu_gate


class TorchOperations:
    """One torch operation after the other."""

    def norm(self, kind: Norm, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return kind(x, weight, eps)

    def add_norm(
        self, kind: Norm, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + x
        return kind(total, weight, eps), total

    def gate(self, kind: Gate, gate_up: torch.Tensor) -> torch.Tensor:
        return kind(gate_up)

    def write_heads(
        self, qkv: torch.Tensor, heads: HeadSpec, rope: Rope | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> torch.Tensor:
        sizes = [count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
        query, key, value = (part.unflatten(-1, (-1, heads.head_dim)) for part in qkv.split(sizes, dim=-1))
        if heads.q_norm is not None:
            query = rms_norm(query, heads.q_norm, heads.norm_eps)
            key = rms_norm(key, heads.k_norm, heads.norm_eps)
        if rope is not None:
            query, key = rotate(query, *rope.rows()), rotate(key, *rope.rows())
        self.write(key, value, slots, layer_cache)
        return query

    def write(
        self, key: torch.Tensor, value: torch.Tensor | None, slots: torch.Tensor, layer_cache: LayerCache
    ) -> None:
        if slots.is_cpu and (slots < 0).any():  # not on a GPU, which would have to wait: there, no row is padding
            real = slots >= 0
            key, value, slots = key[real], None if value is None else value[real], slots[real]
        for plane, vectors in enumerate((key,) if value is None else (key, value)):
            if layer_cache.scales is None:
                layer_cache.values[plane].index_copy_(0, slots, vectors)
            else:
                stored, scales = quantise(vectors)
                layer_cache.values[plane].view(torch.uint8).index_copy_(0, slots, stored.view(torch.uint8))
                layer_cache.scales[plane].index_copy_(0, slots, scales)

    def mixture(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, gate_up: Experts, down: Experts
    ) -> torch.Tensor:
        return mixture(x, weights, experts, gate_up, down, lambda both: self.gate(silu_gate, both))
