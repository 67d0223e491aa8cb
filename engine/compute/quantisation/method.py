"""How a linear layer multiplies: a swap point."""

from typing import Protocol

import torch


class LinearMethod(Protocol):
    """A matrix and its bias in the order in which a kernel reads them."""

    out_features: int
    in_features: int
    nbytes: int  # that a multiplication reads: codes, scales, zeros, padding and bias

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] → x @ weight.T + bias [num_tokens, out_features], in the dtype of x."""
        ...

    def dequantised(self) -> torch.Tensor:
        """The weight that is multiplied by, [out_features, in_features] float32, without the bias. For tests, and for
        measurements of the error."""
        ...
