"""Matrix products with weights."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from sojourn.engine.compute.addition import Addition
from sojourn.engine.compute.cuts import Cut
from sojourn.engine.compute.quantisation.kernels import Kernels
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.compute.quantisation.method import LinearMethod
from sojourn.engine.compute.quantisation.parts import SourceParts
from sojourn.engine.compute.weight_formats import WeightFormat


class LinearPart(NamedTuple):
    """One module of a checkpoint in a linear layer of ours: its outputs begin at `begin`."""

    linear: "Linear"
    begin: int
    out_features: int
    cut: Cut | None = None  # that this rank holds of the module; None: all


class Linear(nn.Module):
    """x [num_tokens, in_features] → x @ weight.T + bias, [num_tokens, out_features].

    `method` multiplies; without one torch does, by `weight`. A weight that stays quantised is of the meta device.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: nn.Parameter | torch.Tensor | None = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.method: LinearMethod | None = None
        self.addition: Addition | None = None
        self._sources = SourceParts(out_features)
        self._num_parameters = self.num_weights + (out_features if bias else 0)

    @property
    def num_weights(self) -> int:
        """Of the matrix: each is multiplied once a token."""
        return self.in_features * self.out_features

    @property
    def packed_parameters(self) -> int:
        """How many weights are no parameters of the module: a method has them, or will."""
        if self.method is not None:
            return self._num_parameters
        return 0 if self._sources.kernel is None else self.num_weights

    @property
    def packed_bytes(self) -> int:
        """That the method takes, or will take."""
        return self._sources.nbytes if self.method is None else self.method.nbytes

    @property
    def weights_to_pack(self) -> int:
        """How many weights `pack` would put into its format."""
        return self.num_weights if self.method is None and self._sources.kernel is None else 0

    def store_as(self, dtype: torch.dtype) -> None:
        """Gives the weight this dtype, before it is filled."""
        if self._sources.kernel is None:
            self.weight = nn.Parameter(self.weight.to(dtype))

    def matrices(self) -> list[torch.Tensor]:
        """The tensors whose views `slices` gives, for `place`."""
        return [self.weight]

    def place(self, target: torch.Tensor, matrix: QuantisedMatrix) -> None:
        """Takes the source that belongs at `target`, a view of the weight."""
        self._sources.add(target.storage_offset() // self.in_features, matrix)

    def choose(self, kernels: Kernels) -> None:
        """Keeps the weight quantised where a kernel fits the sources that were outlined: it gets no memory here."""
        if self._sources.choose(kernels) is None:
            return
        outline = self.weight.detach()
        del self.weight
        self.weight = torch.empty_like(outline, device="meta")

    @property
    def kept_as(self) -> str | None:
        """The format of a weight that stays quantised."""
        return None if self._sources.kernel is None else self._sources.kernel.name

    @property
    def placed(self) -> bool:
        """Whether all sources of the quantised weight have come."""
        return self._sources.kernel is not None and self.method is None and self._sources.complete

    def biases(self) -> list[torch.Tensor]:
        """Those that `finish` needs filled."""
        return [] if self.bias is None else [self.bias]

    def finish(self) -> None:
        """Makes the method of the sources; the bias is filled. Raises ModelError."""
        self.method = self._sources.method(None if self.bias is None else self.bias.detach())
        self.weight = self.bias = None

    def pack(self, weight_format: WeightFormat) -> None:
        """Puts the filled weight into the order that its kernel reads; the original goes. Raises ModelError."""
        self.method = weight_format.pack(self.weight.detach(), None if self.bias is None else self.bias.detach())
        self.weight = self.bias = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.weight, self.bias) if self.method is None else self.method.apply(x)
        return y if self.addition is None else self.addition.add(x, y)
