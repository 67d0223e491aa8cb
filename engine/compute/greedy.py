"""The most probable token of each row."""

import ctypes
import functools
from collections.abc import Callable

import torch

from engine.compute.cpp.extension import library


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """[rows, vocab_size] → ids [rows] int64, the first of equals. Rows that hold NaN give any id.

    On a CPU torch compares one number after another, which takes longer than reading them from memory.
    """
    fitting = logits.is_cpu and logits.dtype == torch.float32 and logits.is_contiguous()
    kernel = _kernel() if fitting else None
    if kernel is None:
        return logits.argmax(dim=-1)
    rows, size = logits.shape
    ids = torch.empty(rows, dtype=torch.int64)
    kernel(logits.data_ptr(), ids.data_ptr(), rows, size)
    return ids


@functools.cache
def _kernel() -> Callable[..., None] | None:
    kernels = library()
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    return None if kernels is None else kernels.function("sojourn_argmax", pointer, pointer, integer, integer)
