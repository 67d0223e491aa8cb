"""Matrix products with weights."""

import torch
import torch.nn.functional as F
from torch import nn

from engine.compute.weight_formats import PackedWeight, WeightFormat


class Linear(nn.Module):
    """x [num_tokens, in_features] → x @ weight.T + bias, [num_tokens, out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: nn.Parameter | None = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: PackedWeight | None = None
        self._num_parameters = self.num_weights + (out_features if bias else 0)

    @property
    def num_weights(self) -> int:
        """Of the matrix: each is multiplied once a token."""
        return self.in_features * self.out_features

    @property
    def packed_parameters(self) -> int:
        """How many weights are packed: no parameters of the module any more."""
        return 0 if self.packed is None else self._num_parameters

    @property
    def packed_bytes(self) -> int:
        return 0 if self.packed is None else self.packed.nbytes

    def store_as(self, dtype: torch.dtype) -> None:
        """Gives the weight this dtype, before it is filled."""
        self.weight = nn.Parameter(self.weight.to(dtype))

    def pack(self, weight_format: WeightFormat) -> None:
        """Puts the filled weight into the order that its kernel reads; the original goes. Raises ModelError."""
        self.packed = weight_format.pack(self.weight.detach(), None if self.bias is None else self.bias.detach())
        self.weight = self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) if self.packed is None else self.packed(x)
