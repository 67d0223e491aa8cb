"""Matrices in the order in which the C++ kernels of linear layers read them."""

import ctypes
from collections.abc import Callable

import torch

from sojourn.engine.compute.cpp.extension import Library

PANEL = 64  # output channels that lie together
LARGEST_INNER = (2**31 - 1) // (127 * 255)  # of 8 bits: more products may not fit into an int32

_SIZES = (ctypes.c_int64,) * 3
_POINTER = ctypes.c_void_p


class CppWeight:
    """A packed matrix and its kernel, which cpp/layers.cpp calls as well. The kernel takes pointers to `parts` last.

    `unpack` makes the weight [out, in] float32 out of the parts.
    """

    def __init__(
        self, kernel: Callable[..., None], shape: torch.Size, unpack: Callable[..., torch.Tensor],
        *parts: torch.Tensor | None,
    ):  # fmt: skip
        self.out_features, self.in_features = shape
        self.kernel, self._unpack, self._parts = kernel, unpack, parts
        self.pointers = tuple(None if part is None else part.data_ptr() for part in parts)
        self.nbytes = sum(part.nbytes for part in parts if part is not None)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        # The kernels read memory, and would read whatever stands there.
        fitting = x.dtype == torch.float32 and x.dim() == 2 and x.shape[1] == self.in_features
        assert fitting, "float32 [num_tokens, in_features]"
        x, y = x.contiguous(), torch.empty(len(x), self.out_features)
        self.kernel(x.data_ptr(), y.data_ptr(), len(x), self.out_features, self.in_features, *self.pointers)
        return y

    def dequantised(self) -> torch.Tensor:
        return self._unpack(*self._parts)[: self.out_features, : self.in_features]


def matrix_kernel(library: Library, name: str, num_pointers: int) -> Callable[..., None] | None:
    """A function of x, y, three sizes and pointers to the weight's parts; None where the machine has not got it."""
    try:
        return library.function(name, _POINTER, _POINTER, *_SIZES, *(_POINTER,) * num_pointers)
    except AttributeError:
        return None


def int8_kernel(library: Library) -> Callable[..., None] | None:
    """Of weights with one scale an output: gemm_int8.cpp."""
    return matrix_kernel(library, "linear_int8", 4)


def groups_kernel(library: Library) -> Callable[..., None] | None:
    """Of weights of 4 and 8 bits with scales of groups: gemm_groups.cpp."""
    return matrix_kernel(library, "linear_groups", 6)
