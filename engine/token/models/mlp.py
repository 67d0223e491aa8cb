"""The feed-forward part of a layer: gated, or plain."""

import torch
import torch.nn.functional as F
from torch import nn

from sojourn.engine.compute.communication.layout import ONE_PROCESS, ParallelLayout
from sojourn.engine.compute.cuts import Cut, Cuts
from sojourn.engine.compute.linear import Linear, LinearPart
from sojourn.engine.compute.operations.backend import Gate, Operations
from sojourn.engine.compute.operations.reference import silu_gate

NEURONS = "inner values of the feed-forward part"


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)); `gate` does the middle (Shazeer, 2020). A rank of `layout` holds some of the inner
    values: its output is then a part of a sum over ranks."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        gate: Gate = silu_gate,
        layout: ParallelLayout = ONE_PROCESS,
    ):
        super().__init__()
        self.is_partial = layout.tensor_parallel > 1
        self._inner = layout.tensor_part(intermediate_size, NEURONS), intermediate_size
        self._adds_bias = layout.tensor_rank == 0
        intermediate_size = len(self._inner[0])
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
        size, cuts = self.down.in_features, self.cuts(prefix)
        found = {
            f"{prefix}.gate_proj": LinearPart(self.gate_up, 0, size),
            f"{prefix}.up_proj": LinearPart(self.gate_up, size, size),
            f"{prefix}.down_proj": LinearPart(self.down, 0, self.down.out_features),
        }
        return {name: part._replace(cut=cuts.get(f"{name}.weight")) for name, part in found.items()}

    def cuts(self, prefix: str) -> Cuts:
        """What this rank holds of the checkpoint's tensors; whole are those that are not named."""
        if not self.is_partial:
            return {}
        return inner_cuts(prefix, *self._inner, self.down.out_features, adds_bias=self._adds_bias)

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        targets = {f"{prefix}.down_proj.weight": self.down.weight}
        targets[f"{prefix}.gate_proj.weight"], targets[f"{prefix}.up_proj.weight"] = self.gate_up.weight.chunk(2)
        if self.gate_up.bias is not None:
            targets[f"{prefix}.gate_proj.bias"], targets[f"{prefix}.up_proj.bias"] = self.gate_up.bias.chunk(2)
            targets[f"{prefix}.down_proj.bias"] = self.down.bias
        return targets


def inner_cuts(prefix: str, inner: range, whole: int, hidden_size: int, *, adds_bias: bool) -> Cuts:
    """Of a feed-forward part, of which a rank holds the `inner` ones of `whole` inner values."""
    rows = Cut.of_units(0, inner, whole, 1)
    found: Cuts = {f"{prefix}.{name}_proj.{kind}": rows for name in ("gate", "up") for kind in ("weight", "bias")}
    found[f"{prefix}.down_proj.weight"] = rows.of_inputs()
    found[f"{prefix}.down_proj.bias"] = Cut.added_once(hidden_size, here=adds_bias)
    return found


class PlainMLP(nn.Module):
    """down(gelu(up(x))), or a rank's part of it."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, layout: ParallelLayout = ONE_PROCESS):
        super().__init__()
        self.is_partial = layout.tensor_parallel > 1
        self._inner = layout.tensor_part(intermediate_size, NEURONS), intermediate_size
        intermediate_size = len(self._inner[0])
        self.up = Linear(hidden_size, intermediate_size)
        self.down = Linear(intermediate_size, hidden_size)

    @property
    def active_parameters(self) -> int:
        return self.up.num_weights + self.down.num_weights

    def forward(self, x: torch.Tensor, operations: Operations) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))

    def parts(self, prefix: str) -> dict[str, LinearPart]:
        """The checkpoint's linear modules by name."""
        cuts = self.cuts(prefix)
        found = {
            f"{prefix}.up_proj": LinearPart(self.up, 0, self.up.out_features),
            f"{prefix}.down_proj": LinearPart(self.down, 0, self.down.out_features),
        }
        return {name: part._replace(cut=cuts.get(f"{name}.weight")) for name, part in found.items()}

    def cuts(self, prefix: str) -> Cuts:
        """As of GatedMLP."""
        return inner_cuts(prefix, *self._inner, self.down.out_features, adds_bias=True) if self.is_partial else {}

    def slices(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}.up_proj.weight": self.up.weight, f"{prefix}.down_proj.weight": self.down.weight}
