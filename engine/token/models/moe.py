"""Mixture of experts: a router chooses a few feed-forward networks for each token (Shazeer et al., 2017)."""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn

from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout, even_part
from sojourn.engine.compute.cuts import Cuts
from sojourn.engine.compute.linear import LinearPart
from sojourn.engine.compute.operations.backend import Gate, Operations
from sojourn.engine.compute.operations.reference import silu_gate
from sojourn.engine.compute.quantisation.kernels import Kernels
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.compute.quantisation.method import LinearMethod
from sojourn.engine.compute.quantisation.parts import SourceParts, storage_of
from sojourn.engine.compute.weight_formats import WeightFormat
from sojourn.engine.token.models.mlp import NEURONS, GatedMLP, inner_cuts

# (router logits [num_tokens, num_experts] float32, correction bias [num_experts] or None) → (weights, experts), each
# [num_tokens, num_chosen]
Route = Callable[[torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor]]


class MixtureOfExperts(nn.Module):
    """The router works in float32 whatever the dtype of the rest: two experts that rounding makes equal are a coin
    toss.

    A rank of `layout` holds some of the experts, and of each some of the inner values; every rank routes all tokens.
    Its output is then a part of a sum over ranks. Or each rank routes a part of the tokens: see expert_exchange.py.
    """

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
        router_bias: bool = False,
        gate: Gate = silu_gate,
        bias: bool = False,
        layout: ParallelLayout = ONE_PROCESS,
    ):
        super().__init__()
        self.is_partial = layout.ranks_per_stage > 1
        self.divides_tokens = layout.divides_tokens
        self.num_experts, self.num_chosen, self.route = num_experts, num_chosen, route
        self.held = even_part(num_experts, layout.expert_parallel, layout.expert_rank, "expert_parallel", "experts")
        share = layout.ranks_per_expert, layout.rank_in_expert
        self._inner = even_part(intermediate_size, *share, "tensor_parallel", NEURONS), intermediate_size
        self._adds_bias = layout.rank_in_expert == 0
        intermediate_size = len(self._inner[0])
        self.router = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=torch.float32))
        self.correction_bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32)) if correction_bias else None
        self.router_bias = nn.Parameter(torch.empty(num_experts, dtype=torch.float32)) if router_bias else None
        self.gate = gate
        num_experts = len(self.held)
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size)) if bias else None
        self._num_biases = num_experts * (2 * intermediate_size + hidden_size) if bias else 0
        self.expert_parameters = 3 * intermediate_size * hidden_size  # of one expert
        self.methods: tuple[list[LinearMethod], list[LinearMethod]] | None = None  # of each expert: gate_up, down
        sizes = 2 * intermediate_size, hidden_size
        self._sources = tuple([SourceParts(outputs) for _ in range(num_experts)] for outputs in sizes)
        self._kept = False  # the experts stay quantised; their tensors are of the meta device
        # A rank adds the shared experts where each holds a part of them, or else one for all; or each to its tokens.
        adds_shared = layout.tensor_parallel > 1 or layout.rank_in_stage == 0 or layout.divides_tokens
        self._shares = bool(shared_intermediate_size)
        self.shared = (
            GatedMLP(hidden_size, shared_intermediate_size, layout=layout) if self._shares and adds_shared else None
        )
        self.watch: Callable[[torch.Tensor], None] | None = None  # gets each pass's chosen experts

    @property
    def num_weights(self) -> int:
        """Of the matrices of all experts that the rank holds."""
        return len(self.held) * self.expert_parameters

    @property
    def packed_parameters(self) -> int:
        """How many weights are no parameters of the module: methods have them, or will."""
        if self.methods is not None:
            return self.num_weights + self._num_biases
        return self.num_weights if self._kept else 0

    @property
    def packed_bytes(self) -> int:
        """That the methods take, or will take."""
        held = self._sources if self.methods is None else self.methods
        return sum(expert.nbytes for stack in held for expert in stack)

    @property
    def weights_to_pack(self) -> int:
        return 0 if self.packed_parameters else self.num_weights

    @property
    def expert_bytes(self) -> int:
        """That one expert takes."""
        if not self.packed_parameters:
            return self.expert_parameters * self.down.element_size() + self._bias_bytes // len(self.held)
        return (self.packed_bytes + (self._bias_bytes if self.methods is None else 0)) // len(self.held)

    @property
    def _bias_bytes(self) -> int:
        return sum(bias.nbytes for bias in self.biases())

    def store_as(self, dtype: torch.dtype) -> None:
        if not self._kept:
            self.gate_up, self.down = (nn.Parameter(part.to(dtype)) for part in (self.gate_up, self.down))

    def matrices(self) -> list[torch.Tensor]:
        """The tensors whose views `slices` gives, for `place`."""
        return [self.gate_up, self.down]

    def place(self, target: torch.Tensor, matrix: QuantisedMatrix) -> None:
        """Takes the source that belongs at `target`, a view of an expert's matrix."""
        for stack, sources in zip(self.matrices(), self._sources, strict=True):
            if storage_of(stack) == storage_of(target):
                expert, row = divmod(target.storage_offset() // stack.shape[2], stack.shape[1])
                sources[expert].add(row, matrix)

    def choose(self, kernels: Kernels) -> None:
        """Keeps the experts quantised where one kernel fits all that were outlined: they then get no memory here."""
        kernels = kernels if kernels.experts else Kernels()
        chosen = {sources.choose(kernels) for stack in self._sources for sources in stack}
        if len(chosen) > 1 or None in chosen:
            self._sources = tuple([SourceParts(part.shape[1]) for _ in self.held]
                                  for part in self.matrices())  # fmt: skip
            return
        self._kept = True
        for name in ("gate_up", "down"):
            outline = torch.empty_like(getattr(self, name), device="meta", requires_grad=False)
            delattr(self, name)
            setattr(self, name, outline)

    @property
    def kept_as(self) -> str | None:
        """The format of experts that stay quantised."""
        return self._sources[0][0].kernel.name if self._kept else None

    @property
    def placed(self) -> bool:
        """Whether all sources of the quantised experts have come."""
        return self._kept and self.methods is None and all(s.complete for stack in self._sources for s in stack)

    def biases(self) -> list[torch.Tensor]:
        """Those that `finish` needs filled."""
        return [] if self.gate_up_bias is None else [self.gate_up_bias, self.down_bias]

    def finish(self) -> None:
        """Makes a method of each expert's sources. Raises ModelError."""
        self.methods = tuple(
            [sources.method(bias) for sources, bias in zip(stack, biases, strict=True)]
            for stack, biases in zip(self._sources, self._expert_biases(), strict=True)
        )
        self.gate_up = self.down = self.gate_up_bias = self.down_bias = None

    def pack(self, weight_format: WeightFormat) -> None:
        """Packs each expert's filled matrices; the originals go. Raises ModelError."""
        parts = self.gate_up.detach(), self.down.detach()
        self.methods = tuple(
            [weight_format.pack(expert, bias) for expert, bias in zip(part, biases, strict=True)]
            for part, biases in zip(parts, self._expert_biases(), strict=True)
        )
        self.gate_up = self.down = self.gate_up_bias = self.down_bias = None

    def _expert_biases(self) -> list[list[torch.Tensor | None]]:
        """Of both matrices of each expert, in memory of their own."""
        if self.gate_up_bias is None:
            return [[None] * len(self.held)] * 2
        return [[bias.clone() for bias in stack.detach()] for stack in self.biases()]

    @property
    def active_parameters(self) -> int:
        shared = self.shared.active_parameters if self.shared is not None else 0
        return self.router.numel() + shared + int(self.chosen_here * self.expert_parameters)

    @property
    def chosen_here(self) -> float:
        """How many of the experts that this rank holds a token has, if all are chosen equally often."""
        return (
            self.num_chosen
            if len(self.held) == self.num_experts
            else (self.num_chosen * len(self.held) / self.num_experts)
        )

    def forward(self, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        weights, experts = self.routed(x)
        if self.watch is not None:
            self.watch(experts)
        mixed = self.mixed(x, weights, experts, operations)
        return mixed if self.shared is None else mixed + self.shared(x, operations)

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [num_tokens, hidden_size] → (weights, experts), each [num_tokens, num_chosen]."""
        return self.route(F.linear(x.float(), self.router, self.router_bias), self.correction_bias)

    def mixed(
        self, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, operations: Operations
    ) -> torch.Tensor:
        """The weighted sum of the chosen experts that this rank holds [num_tokens, hidden_size]."""
        gate_up, down = self.methods or (self.gate_up, self.down)
        biases = None if self.gate_up_bias is None else (self.gate_up_bias, self.down_bias)
        elsewhere = len(self.held) < self.num_experts
        if elsewhere:
            experts = self._numbered_here(experts)
        return operations.mixture(x, weights, experts, gate_up, down, self.gate, biases, elsewhere=elsewhere)

    def _numbered_here(self, experts: torch.Tensor) -> torch.Tensor:
        """Experts by their place among those of this rank; the number behind the last for those of other ranks."""
        places = experts - self.held.start
        return torch.where((places < 0) | (places >= len(self.held)), len(self.held), places)

    def parts(self, prefix: str) -> dict[str, LinearPart]:
        """The checkpoint's linear modules by name, without router and experts, which are no linear layers here."""
        return {} if self.shared is None else self.shared.parts(f"{prefix}.shared_experts")

    def cuts(self, prefix: str) -> Cuts:
        """What this rank holds of the checkpoint's tensors; whole are those that are not named."""
        if not self.is_partial:
            return {}
        found: Cuts = {}
        for index in range(self.num_experts):
            expert = f"{prefix}.experts.{index}"
            cuts = inner_cuts(expert, *self._inner, self.router.shape[1], adds_bias=self._adds_bias)
            found |= cuts if index in self.held else dict.fromkeys(cuts)
        if self.shared is not None:
            found |= self.shared.cuts(f"{prefix}.shared_experts")
        elif self._shares:
            found |= {f"{prefix}.shared_experts.{name}_proj.weight": None for name in ("gate", "up", "down")}
        return found

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        targets = {f"{prefix}.gate.weight": self.router}
        if self.correction_bias is not None:
            targets[f"{prefix}.gate.e_score_correction_bias"] = self.correction_bias
        if self.router_bias is not None:
            targets[f"{prefix}.gate.bias"] = self.router_bias
        for index, number in enumerate(self.held):
            expert = f"{prefix}.experts.{number}"
            gate, up = self.gate_up[index].chunk(2)
            targets[f"{expert}.gate_proj.weight"], targets[f"{expert}.up_proj.weight"] = gate, up
            targets[f"{expert}.down_proj.weight"] = self.down[index]
            if self.gate_up_bias is not None:
                gate, up = self.gate_up_bias[index].chunk(2)
                targets[f"{expert}.gate_proj.bias"], targets[f"{expert}.up_proj.bias"] = gate, up
                targets[f"{expert}.down_proj.bias"] = self.down_bias[index]
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
