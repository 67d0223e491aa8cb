"""Which part of a checkpoint's tensor one rank holds."""

import math
from dataclasses import dataclass, replace

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix, Stored
from sojourn.metrics.errors import ModelError


@dataclass(frozen=True, slots=True)
class Cut:
    """Indices begin … end - 1 of one dimension, of `whole`: 0 are the outputs of a matrix, 1 its inputs."""

    dim: int
    begin: int
    end: int
    whole: int
    is_added: bool = True  # False: another rank adds it, and here it is zero

    @classmethod
    def of_units(cls, dim: int, units: range, num_units: int, size: int) -> "Cut":
        """Some of `num_units` heads or experts, of `size` indices each."""
        return cls(dim, units.start * size, units.stop * size, num_units * size)

    @classmethod
    def added_once(cls, size: int, *, here: bool) -> "Cut":
        """A bias behind a sum over ranks: one of them adds it."""
        return cls(0, 0, size, size, here)

    def of_inputs(self) -> "Cut":
        """The same indices of a matrix's inputs."""
        return replace(self, dim=1)

    def whole_shape(self, shape: torch.Size) -> list[int]:
        """Of the stored tensor, whose part has `shape`."""
        return [self.whole if dim == self.dim else size for dim, size in enumerate(shape)]

    def of(self, name: str, stored: Stored) -> Stored:
        """This part of the tensor of that name: a view where it is dense. Raises ModelError."""
        if isinstance(stored, torch.Tensor):
            part = stored.narrow(self.dim, self.begin, self.end - self.begin)
            return part if self.is_added else torch.zeros_like(part)
        if self.dim == 0:
            return stored.rows(self.begin, self.end)
        return columns(name, stored, self.begin, self.end)


Cuts = dict[str, Cut | None]  # by names of a checkpoint; None: another rank holds the tensor


def columns(name: str, matrix: QuantisedMatrix, begin: int, end: int) -> QuantisedMatrix:
    """The inputs begin … end - 1. Groups that the borders cross become several of one scale. Raises ModelError."""
    if matrix.order is not None:
        raise ModelError(
            f"tensor {name} has its inputs in an order of their own (desc_act), which ranks cannot share; use "
            "tensor_parallel=1, or a checkpoint without it"
        )
    inputs, group = matrix.shape[1], matrix.group
    if group == inputs:
        return replace(matrix, codes=matrix.codes[:, begin:end].contiguous(), group=end - begin)
    size = math.gcd(group, begin, end)

    def cut(table: torch.Tensor | None) -> torch.Tensor | None:
        if table is None:
            return None
        first, last = begin // group, -(-end // group)
        finer = table[:, first:last].repeat_interleave(group // size, dim=1)
        skipped = (begin - first * group) // size
        return finer[:, skipped : skipped + (end - begin) // size].contiguous()

    codes = matrix.codes[:, begin:end].contiguous()
    return replace(matrix, codes=codes, scales=cut(matrix.scales), zeros=cut(matrix.zeros), group=size)
