"""How queries, keys and values are made of heads, and the angles that rotate them."""

from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """How a row of fused queries, keys and values is made of heads."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    q_norm: torch.Tensor | None = None  # [head_dim], with k_norm: each head's root-mean-square norm
    k_norm: torch.Tensor | None = None


@dataclass(slots=True)
class Rope:
    """The angles of one step: the tables of all positions, and the positions."""

    cos: torch.Tensor  # [max_len, 1, head_dim]
    sin: torch.Tensor
    positions: torch.Tensor  # [num_tokens] int64
    _rows: tuple[torch.Tensor, torch.Tensor] | None = field(default=None, repr=False)

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of each token, [num_tokens, 1, head_dim], gathered once for all layers."""
        if self._rows is None:
            self._rows = self.cos[self.positions], self.sin[self.positions]
        return self._rows
