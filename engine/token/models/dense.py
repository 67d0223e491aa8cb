"""The dense decoder with grouped-query attention that Llama and Qwen3 share. A family file says how it differs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.attention import AttentionBackend
from engine.compute.ops import rms_norm, rotate, silu_gate
from engine.token.checkpoint import ModelError
from engine.token.models.rope import rope_table
from metrics.costmodel import ModelShape


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """What a dense decoder is built from. `rope` is the checkpoint's config.json, of which the rope part is read."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_model_len: int
    norm_eps: float
    tie_embeddings: bool
    qk_norm: bool
    rope: dict[str, Any]


class Attention(nn.Module):
    def __init__(self, config: DenseConfig):
        super().__init__()
        self.config = config
        self.sizes = [n * config.head_dim for n in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
        self.qkv = nn.Parameter(torch.empty(sum(self.sizes), config.hidden_size))
        self.o = nn.Parameter(torch.empty(config.hidden_size, self.sizes[0]))
        if config.qk_norm:
            self.q_norm = nn.Parameter(torch.empty(config.head_dim))
            self.k_norm = nn.Parameter(torch.empty(config.head_dim))

    def forward(self, x, cos, sin, backend: AttentionBackend, layer_cache):
        config = self.config
        query, key, value = F.linear(x, self.qkv).split(self.sizes, dim=-1)
        query = query.unflatten(-1, (config.num_heads, config.head_dim))
        key = key.unflatten(-1, (config.num_kv_heads, config.head_dim))
        value = value.unflatten(-1, (config.num_kv_heads, config.head_dim))
        if config.qk_norm:
            query = rms_norm(query, self.q_norm, config.norm_eps)
            key = rms_norm(key, self.k_norm, config.norm_eps)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return F.linear(backend.forward(query, key, value, layer_cache).flatten(1), self.o)


class Layer(nn.Module):
    def __init__(self, config: DenseConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.attention = Attention(config)
        self.gate_up = nn.Parameter(torch.empty(2 * config.intermediate_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(config.hidden_size, config.intermediate_size))
        self.input_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.post_norm = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x, cos, sin, backend: AttentionBackend, layer_cache):
        x = x + self.attention(rms_norm(x, self.input_norm, self.eps), cos, sin, backend, layer_cache)
        return x + F.linear(silu_gate(F.linear(rms_norm(x, self.post_norm, self.eps), self.gate_up)), self.down)


class DenseDecoder(nn.Module):
    """ids and positions, each [num_tokens] → hidden states [num_tokens, hidden_size]; `logits` for chosen rows."""

    def __init__(self, config: DenseConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.head = self.embedding if config.tie_embeddings else nn.Parameter(torch.empty_like(self.embedding))
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None

    def make_rope(self, max_len: int, device: torch.device) -> None:
        """Angles for positions below `max_len`, in the dtype of the weights."""
        cos, sin = rope_table(self.config.rope, self.config.head_dim, max_len)
        self.cos, self.sin = (t.to(device, self.norm.dtype)[:, None, :] for t in (cos, sin))

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, backend: AttentionBackend, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        x = F.embedding(ids, self.embedding)
        cos, sin = self.cos[positions], self.sin[positions]
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            x = layer(x, cos, sin, backend, layer_cache)
        return rms_norm(x, self.norm, self.config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] → [rows, vocab_size] in float32."""
        return F.linear(hidden, self.head).float()

    def shape(self) -> ModelShape:
        config, size = self.config, self.norm.element_size()
        read = sum(p.numel() for p in self.parameters())
        if not config.tie_embeddings:
            read -= self.embedding.numel()  # rows are gathered from it, it is not read as a whole
        return ModelShape(
            config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
            config.intermediate_size, config.vocab_size, read * size, size,
        )  # fmt: skip

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fills every parameter. Raises ModelError for a tensor that is missing, unknown or of another shape."""
        missing = {name: parameter for name, parameter in self._slices().items()}
        for name, tensor in weights:
            if name == "lm_head.weight" and self.config.tie_embeddings:
                continue
            if name.endswith("rotary_emb.inv_freq"):
                continue  # old checkpoints store what config.json says
            target = missing.pop(name, None)
            if target is None:
                raise ModelError(f"tensor {name} has no place in this architecture; is config.json of another model?")
            if target.shape != tensor.shape:
                raise ModelError(f"tensor {name} has shape {list(tensor.shape)}, expected {list(target.shape)}")
            target.copy_(tensor)
        if missing:
            raise ModelError(f"weights lack {len(missing)} tensors, among them {sorted(missing)[0]}")

    def _slices(self) -> dict[str, torch.Tensor]:
        """Checkpoint name → the part of our (fused) parameters that it fills."""
        targets = {"model.embed_tokens.weight": self.embedding.data, "model.norm.weight": self.norm.data}
        if not self.config.tie_embeddings:
            targets["lm_head.weight"] = self.head.data
        for index, layer in enumerate(self.layers):
            prefix, attention = f"model.layers.{index}", layer.attention
            parts = attention.qkv.data.split(attention.sizes)
            targets |= {f"{prefix}.self_attn.{n}_proj.weight": t for n, t in zip("qkv", parts, strict=True)}
            targets[f"{prefix}.self_attn.o_proj.weight"] = attention.o.data
            if self.config.qk_norm:
                targets[f"{prefix}.self_attn.q_norm.weight"] = attention.q_norm.data
                targets[f"{prefix}.self_attn.k_norm.weight"] = attention.k_norm.data
            gate, up = layer.gate_up.data.chunk(2)
            targets[f"{prefix}.mlp.gate_proj.weight"], targets[f"{prefix}.mlp.up_proj.weight"] = gate, up
            targets[f"{prefix}.mlp.down_proj.weight"] = layer.down.data
            targets[f"{prefix}.input_layernorm.weight"] = layer.input_norm.data
            targets[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm.data
        return targets
