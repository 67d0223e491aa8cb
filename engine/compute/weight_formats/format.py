"""What a weight format is: a swap point."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


class PackedWeight(Protocol):
    """A matrix and its bias in the order in which a kernel reads them."""

    nbytes: int  # that a multiplication reads, padding included

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, in_features] float32 → x @ weight.T + bias [num_tokens, out_features] float32."""
        ...


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to hold matrices. `pack` is given a weight [out_features, in_features] and a float32 bias or None."""

    name: str
    pack: Callable[[torch.Tensor, torch.Tensor | None], PackedWeight]
    caveat: str | None = None  # what is promised elsewhere and does not hold here, as a sentence
