"""Small operations of a decoder layer, as torch references."""

import torch
import torch.nn.functional as F


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
