"""Multi-token prediction (DeepSeek-V3, 2024, section 2.2): the checkpoint's own extra layer drafts.

It stands behind the last layer in the checkpoint. The published models have one (`num_nextn_predict_layers`), which is
called again for each further draft; where there are more, only the first is used.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sojourn.engine.compute.kv_cache import KVCache, bytes_per_token
from sojourn.engine.compute.linear import Linear
from sojourn.engine.compute.logits import argmax
from sojourn.engine.compute.operations.backend import Operations, Rope, Step
from sojourn.engine.techniques.speculation.proposers.proposer import ComputedStep
from sojourn.engine.token.models.decoder import Decoder
from sojourn.engine.token.models.layer import Layer
from sojourn.engine.token.models.moe import MixtureOfExperts, split_experts
from sojourn.metrics.compute.cost_model import ExpertShape, ModelShape
from sojourn.metrics.errors import ModelError

FAMILIES = ("DeepseekV3ForCausalLM",)


class MtpLayer(nn.Module):
    """The layer, between a projection of the embedding and the state, and a head behind a norm of its own. Embedding
    and head are the target's: the report says that they are shared."""

    reads_hidden = True
    reads_layers: tuple[int, ...] = ()

    def __init__(self, target: Decoder):
        super().__init__()
        config = target.config
        self._target, self._size, self.eps = [target], config.hidden_size, config.norm_eps  # its weights are not ours
        self.layer = Layer(config, config.attention(config.windows[-1]), config.mlps[-1]())
        self.joint = Linear(2 * self._size, self._size)
        for name in ("embedding_norm", "state_norm", "norm"):
            self.register_parameter(name, nn.Parameter(torch.empty(self._size)))
        self.kv_layout = self.layer.attention.kv_layout

    def rope(self, positions: torch.Tensor) -> Rope | None:
        cos, sin = self._target[0].rope_tables[0]
        return Rope(cos, sin, positions)

    def states(self, step: ComputedStep, rows: torch.Tensor | None) -> torch.Tensor:
        return step.hidden.clone() if rows is None else step.hidden[rows]

    def compute(self, ids: torch.Tensor, states: torch.Tensor, step: Step, kv_cache: KVCache) -> torch.Tensor:
        target, operations, norm, eps = self._target[0], step.operations, self.layer.norm, self.eps
        embedded = F.embedding(ids, target.embedding).to(states.dtype)
        both = torch.empty(len(ids), 2 * self._size, dtype=states.dtype, device=states.device)
        both[:, : self._size] = operations.norm(norm, embedded, self.embedding_norm, eps)
        both[:, self._size :] = operations.norm(norm, states, self.state_norm, eps)
        residual = self.joint(both)
        normed = operations.norm(norm, residual, self.layer.input_norm, eps)
        x, residual = self.layer(normed, residual, step, kv_cache.layers()[0])
        return residual + x

    def drafts(self, stream: torch.Tensor, operations: Operations) -> torch.Tensor:
        return argmax(self._target[0].head(operations.norm(self.layer.norm, stream, self.norm, self.eps)))

    @property
    def state_flops(self) -> int:
        return 0

    def shape(self, kv_dtype: torch.dtype) -> ModelShape:
        target, layer = self._target[0], self.layer
        own = sum(module.packed_bytes for module in self.modules() if isinstance(module, Linear | MixtureOfExperts))
        own += sum(part.nbytes for part in self.parameters())
        head = target.head.packed_bytes or target.head.weight.nbytes
        experts = None
        if isinstance(layer.mlp, MixtureOfExperts):
            experts = ExpertShape(1, layer.mlp.num_experts, layer.mlp.num_chosen, layer.mlp.expert_bytes)
            own -= experts.num_experts * experts.expert_bytes
        return ModelShape(
            vocab_size=target.config.vocab_size,
            hidden_size=self._size,
            attention_parameters=layer.attention.active_parameters,
            mlp_parameters=layer.mlp.active_parameters + self.joint.num_weights,
            pair_flops=layer.attention.pair_flops,
            windows=((target.config.windows[-1], 1),),
            kv_bytes_per_token=bytes_per_token(self.kv_layout, 1, kv_dtype),
            weight_bytes=own + head,
            experts=experts,
            expansion=layer.attention.expansion(self.norm.dtype),
        )

    def slices(self) -> dict[str, torch.Tensor]:
        own = {
            "layer.eh_proj.weight": self.joint.weight,
            "layer.enorm.weight": self.embedding_norm,
            "layer.hnorm.weight": self.state_norm,
            "layer.shared_head.norm.weight": self.norm,
        }
        return own | self.layer.slices("layer")


def refuse_without_layer(config: dict[str, Any], names: set[str], num_layers: int) -> None:
    """Raises ModelError for a checkpoint that has no such layer. `names` are those of its tensors."""
    architecture, extra = config["architectures"][0], config.get("num_nextn_predict_layers")
    if architecture not in FAMILIES:
        raise ModelError(f"speculation=mtp is for {', '.join(FAMILIES)} with an extra layer, and this model is "
                         f"{architecture}; choose another proposer")  # fmt: skip
    if not extra or f"model.layers.{num_layers}.eh_proj.weight" not in names:
        raise ModelError(
            f"speculation=mtp needs the extra layer model.layers.{num_layers}, which this checkpoint lacks "
            f"(num_nextn_predict_layers={extra!r}); choose another proposer"
        )


def translate_layer(name: str, tensor: torch.Tensor, num_layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor of the whole checkpoint under the names of `MtpLayer.slices`; nothing for those of the target."""
    own = name.removeprefix(f"model.layers.{num_layers}.")
    if own != name and own not in ("embed_tokens.weight", "shared_head.head.weight"):
        yield from split_experts(f"layer.{own}", tensor)
