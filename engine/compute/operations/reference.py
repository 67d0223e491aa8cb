"""Small operations of a decoder layer, as torch references."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F

from sojourn.engine.compute.quantisation.method import LinearMethod

# One matrix of all experts: [num_experts, out_features, in_features], or a method for each.
Experts = torch.Tensor | Sequence[LinearMethod]
GATE_LIMIT, SWISH_GAIN = 7.0, 1.702  # of clamped_swish_gate


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (Zhang and Sennrich, 2019)."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    # torch's own rounds once, after the weight; the models were trained with the rounding before it, too.
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def gemma_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm whose weight is stored less one, multiplied in float32 (Gemma)."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (1.0 + weight.float())).to(x.dtype)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm over the last dimension, without a bias (Ba et al., 2016)."""
    return F.layer_norm(x, weight.shape, weight, None, eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split layout of Hugging Face checkpoints (Su et al., 2021).

    x [num_tokens, heads, head_dim]; cos and sin [num_tokens, 1, head_dim].
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def pairs_to_halves(x: torch.Tensor) -> torch.Tensor:
    """Reorders the last dimension from interleaved pairs to the half-split layout: 0 1 2 3 → 0 2 1 3."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both halves of the last dimension (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def gelu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up by the tanh approximation, both halves of the last dimension (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def clamped_swish_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(1.702 gate) * (up + 1), both halves of the last dimension, gate at most 7 and up within 7 of 0
    (gpt-oss)."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=GATE_LIMIT), up.clamp(-GATE_LIMIT, GATE_LIMIT)
    return gate * torch.sigmoid(gate * SWISH_GAIN) * (up + 1)


def mixture(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: Experts,
    down: Experts,
    gate: Callable[[torch.Tensor], torch.Tensor],
    biases: tuple[torch.Tensor, torch.Tensor] | None = None,
    *,
    elsewhere: bool = False,
) -> torch.Tensor:
    """A mixture of experts: the weighted sum of each token's experts (Shazeer et al., 2017).

    x [num_tokens, hidden_size]; weights and experts (int64) [num_tokens, num_chosen]; gate_up [num_experts, 2 *
    intermediate_size, hidden_size]; down [num_experts, hidden_size, intermediate_size]; biases of both, which methods
    have within. With `elsewhere` the number behind the last expert stands for those of other ranks, which add nothing
    here. Returns [num_tokens, hidden_size]. How many tokens each expert has is read by the host, which on CUDA
    waits for it.
    """
    order = experts.flatten().argsort(stable=True)  # of the pairs (token, chosen): those of an expert together
    rows = order // experts.shape[1]
    counts = torch.bincount(experts.flatten(), minlength=len(gate_up)).tolist()[: len(gate_up)]
    results = x.new_empty(len(order), x.shape[1])
    if elsewhere:
        results[order[sum(counts) :]] = 0
    for expert, (begin, end) in enumerate(pairwise(accumulate(counts, initial=0))):
        if begin < end:
            gate_up_bias, down_bias = (None, None) if biases is None else (biases[0][expert], biases[1][expert])
            hidden = gate(_product(x[rows[begin:end]], gate_up[expert], gate_up_bias))
            results[order[begin:end]] = _product(hidden, down[expert], down_bias)
    # Summed in the order of choice: adding up by index would depend on the order of threads on a GPU.
    return (results.view(*experts.shape, -1) * weights.to(x.dtype)[..., None]).sum(1)


def _product(x: torch.Tensor, weight: torch.Tensor | LinearMethod, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias) if isinstance(weight, torch.Tensor) else weight.apply(x)
