"""Small operations of a decoder layer, as torch references."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in float32 (Zhang and Sennrich, 2019)."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding in the half-split layout of Hugging Face checkpoints (Su et al., 2021).

    x [num_tokens, heads, head_dim]; cos and sin [num_tokens, 1, head_dim].
    """
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def silu_gate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, both halves of the last dimension (Shazeer, 2020)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
