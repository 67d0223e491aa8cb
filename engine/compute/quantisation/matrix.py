"""One form for the quantised matrices of every checkpoint format."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from sojourn.metrics.errors import ModelError


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """weight[o, order[i]] = (codes[o, i] - zeros[o, i // group]) * scales[o, i // group].

    One code is one element, however few bits it needs; a kernel packs them. Tensors of the meta device describe a
    matrix that is not read yet. Stacked experts have one dimension more, in front; `[expert]` is a matrix of one.
    """

    codes: torch.Tensor  # [out, in] uint8, int8 or float8_e4m3fn; 4 bits of float8 are e2m1, which e4m3 holds exactly
    scales: torch.Tensor  # [out, in / group] float32
    zeros: torch.Tensor | None  # [out, in / group] float32, in units of codes; None is 0
    group: int  # inputs that share a scale
    bits: int  # of a code: 0 … 2^bits - 1 as uint8, -2^(bits-1) … 2^(bits-1) - 1 as int8
    order: torch.Tensor | None = None  # [in] int64, a permutation: column i of the codes is input order[i]
    # What the checkpoint wants of activations: None keeps them; int8 or fp8 rounds them by token or by a fixed scale.
    activations: str | None = None
    activation_scale: torch.Tensor | None = None  # [] float32: of fixed (static) activations

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def is_meta(self) -> bool:
        return self.codes.is_meta

    def dim(self) -> int:
        return self.codes.dim()

    def numel(self) -> int:
        return self.codes.numel()

    def to(self, device: torch.device) -> "QuantisedMatrix":
        return self._with(lambda tensor: tensor.to(device), everything=True)

    def __getitem__(self, index: int) -> "QuantisedMatrix":
        return self._with(lambda tensor: tensor[index])

    def __len__(self) -> int:
        return len(self.codes)

    def tensor_split(self, sections: int) -> tuple["QuantisedMatrix", ...]:
        """Equal parts of the outputs, one below the other."""
        size = len(self) // sections
        return tuple(self.rows(size * part, size * (part + 1)) for part in range(sections))

    def rows(self, begin: int, end: int) -> "QuantisedMatrix":
        """The outputs begin … end - 1."""
        return self._with(lambda tensor: tensor[begin:end])

    def reordered_rows(self, index: torch.Tensor | slice | int) -> "QuantisedMatrix":
        """Output i becomes the former output index[i]. A number picks one matrix of a stack."""
        return self._with(lambda tensor: tensor[index])

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor], *, everything: bool = False) -> "QuantisedMatrix":
        """Each tensor with one row an output through `change`; with `everything` the others as well."""
        names = ["codes", "scales", "zeros"] + (["order", "activation_scale"] if everything else [])
        tensors = {name: getattr(self, name) for name in names}
        return replace(self, **{name: change(tensor) for name, tensor in tensors.items() if tensor is not None})

    def dequantised(self) -> torch.Tensor:
        """[out, in] float32."""
        weight = self.codes.float().unflatten(-1, (-1, self.group))
        if self.zeros is not None:
            weight -= self.zeros[..., None]
        weight = weight.mul_(self.scales[..., None]).flatten(-2)
        if self.order is None:
            return weight
        return torch.empty_like(weight).index_copy_(-1, self.order.to(weight.device), weight)

    def check(self, name: str) -> None:
        """Raises ModelError with the tensor's name where the parts do not fit each other, or hold what no weight is."""
        inputs = self.shape[-1]
        if inputs % self.group:
            raise ModelError(f"tensor {name} has {inputs} inputs, which its group size {self.group} does not divide")
        expected = [*self.shape[:-1], inputs // self.group]
        for part, tensor in (("scales", self.scales), ("zeros", self.zeros)):
            if tensor is not None and list(tensor.shape) != expected:
                raise ModelError(f"{part} of {name} have shape {list(tensor.shape)}, expected {expected}")
        if self.order is not None and list(self.order.shape) != [inputs]:
            raise ModelError(f"the order of inputs of {name} has shape {list(self.order.shape)}, expected {[inputs]}")
        if self.is_meta:
            return
        numbers = {"scales": self.scales, "zeros": self.zeros, "activation scale": self.activation_scale}
        for part, tensor in numbers.items():
            if tensor is not None and not tensor.isfinite().all():
                raise ModelError(f"{part} of {name} hold a number that is not finite; the checkpoint is damaged")
        if self.codes.dtype == torch.float8_e4m3fn and ((self.codes.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise ModelError(f"tensor {name} holds a code that is no number; the checkpoint is damaged")


Stored = torch.Tensor | QuantisedMatrix  # what a checkpoint has under a name


def concatenated(parts: Sequence[QuantisedMatrix]) -> QuantisedMatrix | None:
    """The matrices one below the other, as a fused layer has them; None where they do not share one form."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(_form(part) != _form(first) or not _same_order(part, first) for part in parts):
        return None
    scales = [part.activation_scale for part in parts if part.activation_scale is not None]
    return replace(
        first,
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=None if first.zeros is None else torch.cat([part.zeros for part in parts]),
        activation_scale=torch.stack(scales).amax(0) if scales else None,  # the widest range holds all of them
    )


def _form(part: QuantisedMatrix) -> tuple:
    inputs, zeros, static = part.shape[1], part.zeros is None, part.activation_scale is None
    return inputs, part.codes.dtype, part.group, part.bits, zeros, part.activations, static


def _same_order(part: QuantisedMatrix, other: QuantisedMatrix) -> bool:
    if part.order is None or other.order is None:
        return part.order is other.order
    # q, k and v of one layer have the same inputs, but their orders need not agree; an outline reads orders, too.
    return not part.order.is_meta and torch.equal(part.order, other.order)
