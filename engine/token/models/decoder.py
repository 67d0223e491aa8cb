"""The decoder that all families share. A family says of what parts it is made; they say how they compute."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.attention import AttentionBackend, KVLayout
from engine.compute.ops import rms_norm
from engine.token.checkpoint import ModelError
from engine.token.models.moe import MixtureOfExperts
from engine.token.models.rope import rope_table
from metrics.costmodel import ExpertShape, ModelShape

# (name and tensor of the checkpoint) → the same under the names that our parts know; nothing for what is not used
Translate = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]


def as_named(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield name, tensor


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What a decoder is built from. One window and one feed-forward part a layer."""

    hidden_size: int
    vocab_size: int
    max_model_len: int  # by default
    longest_model_len: int  # the most that may be asked for
    norm_eps: float
    tie_embeddings: bool
    attention: Callable[[int | None], nn.Module]  # makes a layer's attention of its window
    windows: tuple[int | None, ...]
    mlps: tuple[Callable[[], nn.Module], ...]  # makes each layer's feed-forward part
    rope: dict[str, Any] | None = (
        None  # the checkpoint's config.json, of which the rope part is read; None: no rotation
    )
    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = rms_norm
    embedding_scale: float | None = None
    translate: Translate = as_named


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.eps = config.norm, config.norm_eps
        self.attention = attention
        self.mlp = mlp
        self.input_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.post_norm = nn.Parameter(torch.empty(config.hidden_size))

    def forward(self, x, rope, backend: AttentionBackend, layer_cache):
        x = x + self.attention(self.norm(x, self.input_norm, self.eps), rope, backend, layer_cache)
        return x + self.mlp(self.norm(x, self.post_norm, self.eps))


class Decoder(nn.Module):
    """ids and positions, each [num_tokens] → hidden states [num_tokens, hidden_size]; `logits` for chosen rows."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(
            Layer(config, config.attention(window), mlp())
            for window, mlp in zip(config.windows, config.mlps, strict=True)
        )
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.head = self.embedding if config.tie_embeddings else nn.Parameter(torch.empty_like(self.embedding))
        self.cos: torch.Tensor | None = None
        self.sin: torch.Tensor | None = None

    @property
    def kv_layout(self) -> KVLayout:
        """What a slot of the KV cache holds in each layer."""
        return self.layers[0].attention.kv_layout

    def make_rope(self, max_len: int, device: torch.device) -> None:
        """Angles for positions below `max_len`, in the dtype of the weights."""
        if self.config.rope is not None:
            cos, sin = rope_table(self.config.rope, self.layers[0].attention.rotary_dim, max_len)
            self.cos, self.sin = (t.to(device, self.norm.dtype)[:, None, :] for t in (cos, sin))

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, backend: AttentionBackend, kv_cache: torch.Tensor
    ) -> torch.Tensor:
        x = F.embedding(ids, self.embedding)
        if self.config.embedding_scale is not None:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        rope = None if self.cos is None else (self.cos[positions], self.sin[positions])
        for layer, layer_cache in zip(self.layers, kv_cache, strict=True):
            x = layer(x, rope, backend, layer_cache)
        return self.config.norm(x, self.norm, self.config.norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden_size] → [rows, vocab_size] in float32."""
        return F.linear(hidden, self.head).float()

    def shape(self) -> ModelShape:
        """What a step's FLOPs and bytes depend on."""
        size = self.norm.element_size()
        read = sum(p.numel() * p.element_size() for p in self.parameters())
        if not self.config.tie_embeddings:
            read -= self.embedding.numel() * size  # rows are gathered from it, it is not read as a whole
        experts = None
        if mixtures := [layer.mlp for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts)]:
            one = mixtures[0]
            experts = ExpertShape(len(mixtures), one.num_experts, one.num_chosen, one.expert_parameters * size)
            read -= experts.num_layers * experts.num_experts * experts.expert_bytes
        return ModelShape(
            vocab_size=self.config.vocab_size,
            hidden_size=self.config.hidden_size,
            layer_parameters=sum(
                layer.attention.active_parameters + layer.mlp.active_parameters for layer in self.layers
            ),
            pair_flops=self.layers[0].attention.pair_flops,
            windows=tuple(Counter(self.config.windows).items()),
            kv_bytes_per_token=len(self.layers) * self.kv_layout.elements_per_token * size,
            weight_bytes=read,
            experts=experts,
        )

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fills every parameter. Raises ModelError for a tensor that is missing, unknown or of another shape."""
        missing = self._slices()
        assert sum(t.numel() for t in missing.values()) == sum(p.numel() for p in self.parameters()), "all are filled"
        for stored_name, stored in weights:
            if stored_name.endswith("rotary_emb.inv_freq"):
                continue  # old checkpoints store what config.json says
            for name, tensor in self.config.translate(stored_name, stored):
                if name == "lm_head.weight" and self.config.tie_embeddings:
                    continue
                target = missing.pop(name, None)
                if target is None:
                    raise ModelError(
                        f"tensor {stored_name} has no place in this architecture; is config.json of another model?"
                    )
                if not tensor.is_floating_point() or tensor.element_size() == 1:
                    raise ModelError(f"tensor {stored_name} is {tensor.dtype}; only 16 and 32 bit floats are supported")
                if target.shape != tensor.shape:
                    shapes = f"{list(tensor.shape)}, expected {list(target.shape)}"
                    raise ModelError(f"tensor {stored_name} has shape {shapes}")
                target.copy_(tensor)
        if missing:
            raise ModelError(f"weights lack {len(missing)} tensors, among them {sorted(missing)[0]}")

    def _slices(self) -> dict[str, torch.Tensor]:
        """Name → the part of our parameters that it fills, as views."""
        targets = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tie_embeddings:
            targets["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}"
            targets |= layer.attention.slices(f"{prefix}.self_attn") | layer.mlp.slices(f"{prefix}.mlp")
            targets[f"{prefix}.input_layernorm.weight"] = layer.input_norm
            targets[f"{prefix}.post_attention_layernorm.weight"] = layer.post_norm
        return targets
