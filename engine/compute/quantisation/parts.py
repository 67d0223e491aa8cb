"""The quantised sources of one matrix of ours, as a checkpoint brings them: q, k and v of a fused projection."""

import torch

from sojourn.engine.compute.quantisation.kernels import Kernel, Kernels
from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix, concatenated
from sojourn.engine.compute.quantisation.method import LinearMethod
from sojourn.metrics.errors import ModelError


def storage_of(tensor: torch.Tensor) -> int:
    """The same number for all views of one tensor, also on the meta device, which has no addresses."""
    return tensor.untyped_storage()._cdata


class SourceParts:
    """Sources lie one below the other. First their outlines come, and the kernel is chosen; then the matrices."""

    def __init__(self, outputs: int):
        self.kernel: Kernel | None = None  # that was chosen; None: the matrix is held as a tensor
        self.nbytes = 0  # that the kernel's method will take
        self._outputs = outputs
        self._by_row: dict[int, QuantisedMatrix] = {}

    def add(self, first_row: int, matrix: QuantisedMatrix) -> None:
        self._by_row[first_row] = matrix

    @property
    def complete(self) -> bool:
        return sum(len(part.codes) for part in self._by_row.values()) == self._outputs

    def choose(self, kernels: Kernels) -> Kernel | None:
        """The kernel for the sources that were outlined; None where they are dequantised. Forgets the outlines."""
        joined = self._joined() if self.complete else None
        self._by_row.clear()
        self.kernel = None if joined is None else kernels.fitting(joined)
        self.nbytes = 0 if self.kernel is None else self.kernel.nbytes(joined)
        return self.kernel

    def method(self, bias: torch.Tensor | None) -> LinearMethod:
        """Makes the method, and forgets the sources."""
        joined = self._joined()
        if joined is None or not self.kernel.fits(joined):
            raise ModelError("a quantised layer differs from what the headers of its files said; the files changed")
        self._by_row.clear()
        return self.kernel.make(joined, bias)

    def _joined(self) -> QuantisedMatrix | None:
        return concatenated([part for _, part in sorted(self._by_row.items(), key=lambda item: item[0])])
