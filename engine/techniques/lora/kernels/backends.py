"""Which kernels add the deltas of adapters on a device."""

from collections.abc import Sequence

import torch

from sojourn.engine.compute.backends import cpu_kernels, has_triton
from sojourn.engine.techniques.lora.kernels.backend import AdaptedLinear, LoraBackend
from sojourn.engine.techniques.lora.kernels.cpp_backend import CppLora
from sojourn.engine.techniques.lora.kernels.torch_backend import TorchLora


def make_lora(
    name: str, device: torch.device, dtype: torch.dtype, max_loras: int, max_rank: int, linears: Sequence[AdaptedLinear]
) -> LoraBackend:
    """What adds the deltas of adapters, of as many slots, to linear layers; `name` as in `make_operations`."""
    if name == "auto" and has_triton(device):
        from sojourn.engine.techniques.lora.kernels.triton_backend import TritonLora  # Triton takes its time to import

        return TritonLora(max_loras, max_rank, linears, dtype, device)
    library = cpu_kernels(device, dtype, dtype) if name == "auto" else None
    if library is not None:
        return CppLora(library, max_loras, [(linear.in_features, linear.out_features) for linear in linears])
    return TorchLora(max_loras, dtype, device)
