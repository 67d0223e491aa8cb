"""The feed-forward part of a layer: gated, or plain."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.ops import silu_gate


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); `gate` does the middle (Shazeer, 2020)."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        gate: Callable[[torch.Tensor], torch.Tensor] = silu_gate,
    ):
        super().__init__()
        self.gate = gate
        self.gate_up = nn.Parameter(torch.empty(2 * intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, intermediate_size))
        self.gate_up_bias = nn.Parameter(torch.empty(2 * intermediate_size)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(hidden_size)) if bias else None

    @property
    def active_parameters(self) -> int:
        return self.gate_up.numel() + self.down.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.gate(F.linear(x, self.gate_up, self.gate_up_bias)), self.down, self.down_bias)

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint name → the part of our fused parameters that it fills."""
        targets = {f"{prefix}.down_proj.weight": self.down}
        targets[f"{prefix}.gate_proj.weight"], targets[f"{prefix}.up_proj.weight"] = self.gate_up.chunk(2)
        if self.gate_up_bias is not None:
            targets[f"{prefix}.gate_proj.bias"], targets[f"{prefix}.up_proj.bias"] = self.gate_up_bias.chunk(2)
            targets[f"{prefix}.down_proj.bias"] = self.down_bias
        return targets


class PlainMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.up = nn.Parameter(torch.empty(intermediate_size, hidden_size))
        self.down = nn.Parameter(torch.empty(hidden_size, intermediate_size))

    @property
    def active_parameters(self) -> int:
        return self.up.numel() + self.down.numel()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, self.up)), self.down)

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}.up_proj.weight": self.up, f"{prefix}.down_proj.weight": self.down}
