"""Mixture of experts, as a torch reference: tokens are sorted by expert, each expert is two matrix products."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from engine.compute.weight_formats.format import PackedWeight

# Of one matrix of all experts: [num_experts, out_features, in_features], or packed one by one.
Experts = torch.Tensor | Sequence[PackedWeight]


def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Experts,
    down: Experts,
    gate: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What each token's experts make of it, by weight (Shazeer et al., 2017).

    x [num_tokens, hidden_size]; weights and experts (int64) [num_tokens, num_chosen]; gate_up [num_experts, 2 *
    intermediate_size, hidden_size]; down [num_experts, hidden_size, intermediate_size]. Returns [num_tokens,
    hidden_size]. How many tokens each expert has is read by the host, which on CUDA waits for it.
    """
    order = experts.flatten().argsort(stable=True)  # of the pairs (token, chosen): those of an expert together
    rows = order // experts.shape[1]
    counts = torch.bincount(experts.flatten(), minlength=len(gate_up)).tolist()
    results = x.new_empty(len(order), x.shape[1])
    for expert, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        if begin < end:
            hidden = gate(_product(x[rows[begin:end]], gate_up[expert]))
            results[order[begin:end]] = _product(hidden, down[expert])
    # Summed in the order of choice: adding up by index would depend on the order of threads on a GPU.
    return (results.view(*experts.shape, -1) * weights.to(x.dtype)[..., None]).sum(1)


def _product(x: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    return F.linear(x, weight) if isinstance(weight, torch.Tensor) else weight(x)
