"""Matrix products with weights."""

import torch
import torch.nn.functional as F
from torch import nn


class Linear(nn.Module):
    """x [num_tokens, in_features] → x @ weight.T + bias, [num_tokens, out_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    @property
    def num_weights(self) -> int:
        """Of the matrix: each is multiplied once a token."""
        return self.in_features * self.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)
