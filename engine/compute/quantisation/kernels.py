"""Kernels that multiply by quantised matrices as they are stored. What none of them fits is dequantised at load."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from sojourn.engine.compute.quantisation.matrix import QuantisedMatrix
from sojourn.engine.compute.quantisation.method import LinearMethod


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on one device. `fits` reads shapes and dtypes alone: the matrix may be of the meta device."""

    name: str  # of the format, as Ready.weights says it
    fits: Callable[[QuantisedMatrix], bool]
    # (matrix, bias [out] or None) → method on the bias's device; raises ModelError
    make: Callable[[QuantisedMatrix, torch.Tensor | None], LinearMethod]
    nbytes: Callable[[QuantisedMatrix], int]  # that the method will take, without its bias


@dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels of one device for activations of one dtype, best first. Without any, matrices are dequantised."""

    kernels: tuple[Kernel, ...] = ()
    # Whether experts have methods of their own. How many tokens each has is then read by the host: a GPU would wait.
    experts: bool = True

    def fitting(self, matrix: QuantisedMatrix) -> Kernel | None:
        return next((kernel for kernel in self.kernels if kernel.fits(matrix)), None)
