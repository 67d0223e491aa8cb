"""The feed-forward part of a layer: gated, or plain."""

import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.linear import Linear, LinearPart
from engine.compute.operations.backend import Gate, Operations
from engine.compute.operations.reference import silu_gate


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); `gate` does the middle (Shazeer, 2020)."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False, gate: Gate = silu_gate):
        super().__init__()
        self.gate = gate
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    @property
    def active_parameters(self) -> int:
        return self.gate_up.num_weights + self.down.num_weights

    def forward(self, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        return self.down(operations.gated_product(self.gate, x, self.gate_up))

    def parts(self, prefix: str) -> dict[str, LinearPart]:
        """The checkpoint's linear modules by name."""
        size = self.down.in_features
        return {
            f"{prefix}.gate_proj": LinearPart(self.gate_up, 0, size),
            f"{prefix}.up_proj": LinearPart(self.gate_up, size, size),
            f"{prefix}.down_proj": LinearPart(self.down, 0, self.down.out_features),
        }

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        targets = {f"{prefix}.down_proj.weight": self.down.weight}
        targets[f"{prefix}.gate_proj.weight"], targets[f"{prefix}.up_proj.weight"] = self.gate_up.weight.chunk(2)
        if self.gate_up.bias is not None:
            targets[f"{prefix}.gate_proj.bias"], targets[f"{prefix}.up_proj.bias"] = self.gate_up.bias.chunk(2)
            targets[f"{prefix}.down_proj.bias"] = self.down.bias
        return targets


class PlainMLP(nn.Module):
    """down(gelu(up(x)))."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.up = Linear(hidden_size, intermediate_size)
        self.down = Linear(intermediate_size, hidden_size)

    @property
    def active_parameters(self) -> int:
        return self.up.num_weights + self.down.num_weights

    def forward(self, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def parts(self, prefix: str) -> dict[str, LinearPart]:
        """The checkpoint's linear modules by name."""
        return {
            f"{prefix}.up_proj": LinearPart(self.up, 0, self.up.out_features),
            f"{prefix}.down_proj": LinearPart(self.down, 0, self.down.out_features),
        }

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}.up_proj.weight": self.up.weight, f"{prefix}.down_proj.weight": self.down.weight}
