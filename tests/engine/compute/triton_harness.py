"""Triton without a GPU: kernels run in its interpreter, and compile for Hopper with nobody to run them.

Import this before anything that imports triton: whether kernels are interpreted is settled when they are defined.
"""

import os
from importlib.util import find_spec

import torch

from bench.gpu.compilation import SHARED_LIMIT_BYTES, Compilation, compile_for_hopper

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


def round_to_nearest() -> None:
    """Makes the interpreter round float32 to fewer bits as a GPU and torch do. It cuts the digits off, and where it is
    told to round, it loses the carry."""
    import triton.language as tl
    from triton.runtime import interpreter

    cut_off, rounded = interpreter._convert_float, {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}

    def convert(data, source, target, rounding_mode):
        if source != tl.float32 or target not in rounded:
            return cut_off(data, source, target, rounding_mode)
        bits = torch.from_numpy(data.copy()).to(rounded[target])
        return bits.view(torch.uint16 if target == tl.bfloat16 else torch.uint8).numpy()

    interpreter._convert_float = convert


def patch_once() -> None:
    """Spares a device function that the interpreter looks through the whole language again: its kernel has done so."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction

    call = InterpretedFunction.__call__

    def patched(self, *args, **kwargs):
        if self.fn.__globals__.get("tl") is tl:
            return self.rewrite()(*args, **kwargs)
        return call(self, *args, **kwargs)

    InterpretedFunction.__call__ = patched


if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    round_to_nearest()
    patch_once()


def assert_no_spills(compilations: list[Compilation]) -> None:
    """Each kernel compiles for Hopper, keeps its registers and fits into a block's shared memory."""
    for job, resources in zip(compilations, compile_for_hopper(compilations), strict=True):
        assert resources.local_bytes == 0, job
        assert resources.shared_bytes <= SHARED_LIMIT_BYTES, job
