"""Which attention backend and fused operations a device gets: the registry of the swap points."""

from importlib.util import find_spec

import torch

from sojourn.engine.compute.attention.backend import AttentionBackend
from sojourn.engine.compute.attention.cpp_backend import CppAttention
from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.cpp import extension
from sojourn.engine.compute.kv_formats import is_quantised
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.compute.operations.cpp_backend import CppOperations
from sojourn.metrics.errors import ModelError


def make_attention(name: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> AttentionBackend:
    """The backend of EngineConfig.attention_backend; `auto` takes the fastest that this device and dtypes have.

    Raises ModelError.
    """
    if name in ("auto", "triton") and has_triton(device):
        from sojourn.engine.compute.attention.triton_backend import TritonAttention  # Triton takes its time to import

        return TritonAttention(device)
    if name == "triton":
        reason = "it needs a CUDA device" if device.type != "cuda" else "the package triton is not installed"
        raise ModelError(f"attention_backend=triton cannot be had: {reason}; or leave the choice to `auto`")
    library = cpu_kernels(device, dtype, kv_dtype) if name in ("auto", "cpp") else None
    if library is not None:
        return CppAttention(library)
    if name == "cpp":
        fitting = _fits_cpu_kernels(device, dtype, kv_dtype)
        precision = f"{dtype} on {device}" if kv_dtype == dtype else f"{dtype} on {device} with keys in {kv_dtype}"
        reason = extension.unavailable() if fitting else f"it computes in float32 on a CPU, not in {precision}"
        raise ModelError(f"attention_backend=cpp cannot be had: {reason}; or leave the choice to `auto`")
    return TorchAttention()


def make_operations(name: str, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> Operations:
    """The operations of EngineConfig.fused_operations: `auto` takes fused ones where this device has them."""
    if name == "auto" and has_triton(device):
        from sojourn.engine.compute.operations.triton_backend import TritonOperations  # Triton takes its time to import

        return TritonOperations()
    library = cpu_kernels(device, dtype, kv_dtype) if name == "auto" else None
    return CppOperations(library) if library is not None else Operations()


def has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and find_spec("triton") is not None


def cpu_kernels(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> extension.Library | None:
    return extension.library() if _fits_cpu_kernels(device, dtype, kv_dtype) else None


def _fits_cpu_kernels(device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype == torch.float32 and (kv_dtype == dtype or is_quantised(kv_dtype))
