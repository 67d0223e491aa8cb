"""What a family says of its decoder, and one of its layers."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sojourn.engine.compute.communication.communicator import Communicator, SingleProcess
from sojourn.engine.compute.cpp.matrices import CppWeight
from sojourn.engine.compute.cuts import Cuts
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.layers_cpp import LayerParts, RopeTable
from sojourn.engine.compute.operations.backend import Norm, Operations, Step
from sojourn.engine.compute.operations.cpp_backend import GATES
from sojourn.engine.compute.operations.reference import rms_norm
from sojourn.engine.compute.quantisation.matrix import Stored
from sojourn.engine.token.models.expert_exchange import exchanged
from sojourn.engine.token.models.grouped import GroupedAttention
from sojourn.engine.token.models.mlp import GatedMLP
from sojourn.engine.token.models.moe import MixtureOfExperts

# (name and tensor of the checkpoint) → the same under the names of our parts; nothing for a tensor that is not used
Translate = Callable[[str, Stored], Iterable[tuple[str, Stored]]]


def as_named(name: str, tensor: Stored) -> Iterator[tuple[str, Stored]]:
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
    attention: Callable[..., nn.Module]  # (window, layout=…) → the attention of a layer, or a rank's part of it
    windows: tuple[int | None, ...]
    mlps: tuple[Callable[..., nn.Module], ...]  # (layout=…) → each layer's feed-forward part
    rope: dict[str, Any] | None = None  # config.json, of which the rope part is read; None: no rotation
    window_rope: dict[str, Any] | None = None  # the same of the layers with a window, where they have their own
    norm: Norm = rms_norm
    output_norms: bool = False  # a norm behind attention and behind the feed-forward part, too
    embedding_scale: float | None = None
    logit_cap: float | None = None  # a logit x becomes logit_cap * tanh(x / logit_cap)
    translate: Translate = as_named


class Layer(nn.Module):
    """Attention, then a feed-forward part, each behind a norm, or between two. Where ranks hold parts of them, what
    each gives is summed over the ranks of `stage`."""

    def __init__(self, config: DecoderConfig, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.norm, self.eps = config.norm, config.norm_eps
        self.attention = attention
        self.mlp = mlp
        self.stage: Communicator = SingleProcess()
        self.input_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.post_norm = nn.Parameter(torch.empty(config.hidden_size))
        self.attention_norm = self.mlp_norm = None  # of what each of them gives
        if config.output_norms:
            self.attention_norm = nn.Parameter(torch.empty(config.hidden_size))
            self.mlp_norm = nn.Parameter(torch.empty(config.hidden_size))

    def forward(
        self, normed: torch.Tensor, residual: torch.Tensor, step: Step, layer_cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The feed-forward part's output, and the residual stream without it: the next norm adds the two."""
        x = self.attention(normed, step, layer_cache)
        if self.attention.is_partial:
            x = self.stage.all_reduce(x)
        x = self._output(x, self.attention_norm, step)
        normed, residual = step.operations.add_norm(self.norm, x, residual, self.post_norm, self.eps)
        x = self._fed_forward(normed, step.operations)
        return self._output(x, self.mlp_norm, step), residual

    def _fed_forward(self, normed: torch.Tensor, operations: Operations) -> torch.Tensor:
        if isinstance(self.mlp, MixtureOfExperts) and self.mlp.divides_tokens:
            return exchanged(self.mlp, normed, operations, self.stage)
        x = self.mlp(normed, operations)
        return self.stage.all_reduce(x) if self.mlp.is_partial else x

    def cuts(self, prefix: str) -> Cuts:
        """What this rank holds of the layer's tensors; whole are those that are not named."""
        return self.attention.cuts(f"{prefix}.self_attn") | self.mlp.cuts(f"{prefix}.mlp")

    def _output(self, x: torch.Tensor, weight: torch.Tensor | None, step: Step) -> torch.Tensor:
        return x if weight is None else step.operations.norm(self.norm, x, weight, self.eps)

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name → the parameter or the part of one that it fills, without those of norms inside of parts."""
        targets = self.attention.slices(f"{prefix}.self_attn") | self.mlp.slices(f"{prefix}.mlp")
        targets[f"{prefix}.input_layernorm.weight"] = self.input_norm
        if self.attention_norm is None:
            targets[f"{prefix}.post_attention_layernorm.weight"] = self.post_norm
        else:
            targets[f"{prefix}.post_attention_layernorm.weight"] = self.attention_norm
            targets[f"{prefix}.pre_feedforward_layernorm.weight"] = self.post_norm
            targets[f"{prefix}.post_feedforward_layernorm.weight"] = self.mlp_norm
        return targets

    def cpp_parts(self, next_norm: torch.Tensor, rope: RopeTable | None) -> LayerParts | None:
        """The layer for CppLayers; None where some part has no kernel. `next_norm` follows the layer."""
        attention, mlp = self.attention, self.mlp
        if not isinstance(attention, GroupedAttention) or not isinstance(mlp, GatedMLP) or mlp.gate not in GATES:
            return None
        config, linears = attention.config, (attention.qkv, attention.o, mlp.gate_up, mlp.down)
        matrices, additions = [linear.method for linear in linears], [linear.addition for linear in linears]
        if attention.is_partial or mlp.is_partial:  # sums over ranks stand between the kernels
            return None
        plain = config.clip is None and config.alibi_slopes is None and not config.sinks
        if not plain or not all(isinstance(matrix, CppWeight) for matrix in matrices):
            return None
        output_norms = self.attention_norm, self.mlp_norm
        heads, spec = attention.heads, attention.spec
        return LayerParts(*matrices, self.post_norm, next_norm, heads, spec, rope, additions, *output_norms)
