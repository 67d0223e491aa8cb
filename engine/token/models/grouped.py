"""Attention with grouped queries: multi-head and multi-query attention are its two ends (Ainslie et al., 2023)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.attention import AttentionBackend, AttentionSpec, KVLayout
from engine.compute.ops import rms_norm, rotate


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    norm_eps: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    clip: float | None = None  # bound of queries, keys and values
    alibi_slopes: tuple[float, ...] | None = None  # then there is no rotation


class GroupedAttention(nn.Module):
    def __init__(self, config: GroupedConfig, window: int | None):
        super().__init__()
        self.config = config
        self.spec = AttentionSpec(config.scale, config.head_dim, window, config.alibi_slopes)
        self.kv_layout = KVLayout(2, config.num_kv_heads, config.head_dim)
        self.rotary_dim = config.head_dim
        self.pair_flops = 4 * config.num_heads * config.head_dim
        self.sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = nn.Parameter(torch.empty(sum(self.sizes), config.hidden_size))
        self.o = nn.Parameter(torch.empty(config.hidden_size, self.sizes[0]))
        self.qkv_bias = nn.Parameter(torch.empty(sum(self.sizes))) if config.qkv_bias else None
        self.o_bias = nn.Parameter(torch.empty(config.hidden_size)) if config.output_bias else None
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.empty(config.head_dim))
            self.k_norm = nn.Parameter(torch.empty(config.head_dim))

    @property
    def active_parameters(self) -> int:
        return self.qkv.numel() + self.o.numel()

    def forward(self, x, rope, backend: AttentionBackend, layer_cache):
        config = self.config
        qkv = F.linear(x, self.qkv, self.qkv_bias)
        if config.clip is not None:
            qkv = qkv.clamp(-config.clip, config.clip)
        query, key, value = qkv.split(self.sizes, dim=-1)
        query = query.unflatten(-1, (config.num_heads, config.head_dim))
        key = key.unflatten(-1, (config.num_kv_heads, config.head_dim))
        value = value.unflatten(-1, (config.num_kv_heads, config.head_dim))
        if config.qk_norm:
            query = rms_norm(query, self.q_norm, config.norm_eps)
            key = rms_norm(key, self.k_norm, config.norm_eps)
        if rope is not None:
            query, key = rotate(query, *rope), rotate(key, *rope)
        attended = backend.forward(query, key, value, layer_cache, self.spec)
        return F.linear(attended.flatten(1), self.o, self.o_bias)

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name → the part of our fused parameters that it fills."""
        targets = {f"{prefix}.o_proj.weight": self.o}
        for name, part in zip("qkv", self.qkv.split(self.sizes), strict=True):
            targets[f"{prefix}.{name}_proj.weight"] = part
        if self.qkv_bias is not None:
            for name, part in zip("qkv", self.qkv_bias.split(self.sizes), strict=True):
                targets[f"{prefix}.{name}_proj.bias"] = part
        if self.o_bias is not None:
            targets[f"{prefix}.o_proj.bias"] = self.o_bias
        if self.config.qk_norm:
            targets |= {f"{prefix}.q_norm.weight": self.q_norm, f"{prefix}.k_norm.weight": self.k_norm}
        return targets
