"""Which kernels for quantised matrices a device has: the place to add one."""

from importlib.util import find_spec

import torch

from sojourn.engine.compute.quantisation.cpu import cpu_kernels
from sojourn.engine.compute.quantisation.kernels import Kernels


def device_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Those of this machine for activations of `dtype`."""
    if device.type == "cpu" and dtype == torch.float32:
        return Kernels(cpu_kernels())
    if device.type == "cuda" and torch.cuda.is_available() and find_spec("triton"):
        from sojourn.engine.compute.quantisation.cuda import cuda_kernels  # Triton takes its time to import

        return Kernels(cuda_kernels(device, torch.cuda.get_device_capability(device)), experts=False)
    return Kernels()
