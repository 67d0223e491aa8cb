"""Mixture of experts: a router chooses a few feed-forward networks for each token (Shazeer et al., 2017)."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.operations.backend import Operations
from engine.compute.weight_formats import PackedWeight, WeightFormat
from engine.token.models.mlp import GatedMLP

# (router logits [num_tokens, num_experts] float32, correction bias [num_experts] or None) → (weights, experts), each
# [num_tokens, num_chosen]
Route = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


class MixtureOfExperts(nn.Module):
    """The router works in float32 whatever the dtype of the rest: two experts that rounding makes equal are a coin
    toss."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_chosen: int,
        route: Route,
        *,
        shared_intermediate_size: int = 0,
        correction_bias: bool = False,
    ):
        super().__init__()
        self.num_experts, self.num_chosen, self.route = num_experts, num_chosen, route
        self.router = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=torch.float32))
        self.correction_bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32)) if correction_bias else None
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.expert_parameters = 3 * intermediate_size * hidden_size  # of one expert
        self.packed: tuple[list[PackedWeight], list[PackedWeight]] | None = None
        self.shared = GatedMLP(hidden_size, shared_intermediate_size) if shared_intermediate_size else None

    @property
    def num_weights(self) -> int:
        """Of all experts' matrices."""
        return self.num_experts * self.expert_parameters

    @property
    def packed_parameters(self) -> int:
        return 0 if self.packed is None else self.num_weights

    @property
    def packed_bytes(self) -> int:
        return 0 if self.packed is None else sum(expert.nbytes for part in self.packed for expert in part)

    @property
    def expert_bytes(self) -> int:
        """That one expert takes."""
        if self.packed is None:
            return self.expert_parameters * self.down.element_size()
        return self.packed_bytes // self.num_experts

    def store_as(self, dtype: torch.dtype) -> None:
        self.gate_up, self.down = (nn.Parameter(part.to(dtype)) for part in (self.gate_up, self.down))

    def pack(self, weight_format: WeightFormat) -> None:
        """Packs each expert's filled matrices; the originals go. Raises ModelError."""
        parts = self.gate_up.detach(), self.down.detach()
        self.packed = tuple([weight_format.pack(expert, None) for expert in part] for part in parts)
        self.gate_up = self.down = None

    @property
    def active_parameters(self) -> int:
        shared = self.shared.active_parameters if self.shared is not None else 0
        return self.router.numel() + shared + self.num_chosen * self.expert_parameters

    def forward(self, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        weights, experts = self.route(F.linear(x.float(), self.router), self.correction_bias)
        gate_up, down = self.packed or (self.gate_up, self.down)
        mixed = operations.mixture(x, weights, experts, gate_up, down)
        return mixed if self.shared is None else mixed + self.shared(x, operations)

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        targets = {f"{prefix}.gate.weight": self.router}
        if self.correction_bias is not None:
            targets[f"{prefix}.gate.e_score_correction_bias"] = self.correction_bias
        for index in range(self.num_experts):
            expert = f"{prefix}.experts.{index}"
            gate, up = self.gate_up[index].chunk(2)
            targets[f"{expert}.gate_proj.weight"], targets[f"{expert}.up_proj.weight"] = gate, up
            targets[f"{expert}.down_proj.weight"] = self.down[index]
        if self.shared is not None:
            targets |= self.shared.slices(f"{prefix}.shared_experts")
        return targets


def softmax_top_k(logits: torch.Tensor, bias: None, num_chosen: int, normalise: bool):
    """The experts of the highest probabilities, whose probabilities are their weights (Mixtral, Qwen3-MoE)."""
    weights, experts = logits.softmax(-1).topk(num_chosen, dim=-1)
    return (weights / weights.sum(-1, keepdim=True) if normalise else weights), experts


def split_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """All experts in one tensor, as transformers 5 may write them → one tensor each, as published checkpoints have."""
    stem, _, part = name.rpartition(".experts.")
    if not stem or part not in ("gate_up_proj", "down_proj") or tensor.dim() != 3:
        yield name, tensor
        return
    for index, expert in enumerate(tensor):
        if part == "down_proj":
            yield f"{stem}.experts.{index}.down_proj.weight", expert
        else:
            gate, up = expert.tensor_split(2)
            yield f"{stem}.experts.{index}.gate_proj.weight", gate
            yield f"{stem}.experts.{index}.up_proj.weight", up
