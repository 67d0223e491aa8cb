"""What a technique adds to the products of linear layers."""

from typing import Protocol

import torch


class Addition(Protocol):
    """Of one linear layer: what is added may differ from token to token."""

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [num_tokens, out_features] with what x [num_tokens, in_features] adds to it; y may be overwritten."""
        ...

    @property
    def address(self) -> int:
        """Of its matrices, for cpp/layers.cpp."""
        ...

    @property
    def step_address(self) -> int | None:
        """Of what the step adds in all layers; None: nothing."""
        ...
