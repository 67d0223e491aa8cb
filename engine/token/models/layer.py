"""One layer of a decoder, and what a family says of its decoder. The parts say how they compute."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.compute.kv_cache import LayerCache
from engine.compute.operations.backend import Norm, Step
from engine.compute.operations.reference import rms_norm

# (name and tensor of the checkpoint) → the same under the names of our parts; nothing for a tensor that is not used
Translate = Callable[[str, torch.Tensor], Iterable[tuple[str, torch.Tensor]]]


def as_named(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    yield name, tensor


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """What a decoder is built from. One window and one feed-forward part a layer."""

    hidden_size: int
    vocab_size: int
    max_model_len: int  # by default
    longest_model_len: int  # bound of the setting max_model_len
    norm_eps: float
    tie_embeddings: bool
    attention: Callable[[int | None], nn.Module]  # window → the attention of a layer
    windows: tuple[int | None, ...]
    mlps: tuple[Callable[[], nn.Module], ...]  # makes each layer's feed-forward part
    rope: dict[str, Any] | None = None  # config.json, of which the rope part is read; None: no rotation
    norm: Norm = rms_norm
    embedding_scale: float | None = None
    translate: Translate = as_named


class Layer(nn.Module):
    """Attention, then a feed-forward part, each behind a norm."""

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.eps = config.norm, config.norm_eps
        self.attention = attention
        self.mlp = mlp
        self.input_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.post_norm = nn.Parameter(torch.empty(config.hidden_size))

    def forward(
        self, normed: torch.Tensor, residual: torch.Tensor, step: Step, layer_cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The feed-forward part's output, and the residual stream without it: the next norm adds the two."""
        x = self.attention(normed, step, layer_cache)
        normed, residual = step.operations.add_norm(self.norm, x, residual, self.post_norm, self.eps)
        return self.mlp(normed, step.operations), residual
