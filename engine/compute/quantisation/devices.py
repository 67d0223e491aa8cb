"""Which kernels for quantised matrices a device has: the place to add one."""

import torch

from engine.compute.quantisation.cpu import cpu_kernels
from engine.compute.quantisation.kernels import Kernels


def device_kernels(device: torch.device, dtype: torch.dtype) -> Kernels:
    """Those of this machine for activations of `dtype`."""
    if device.type == "cpu" and dtype == torch.float32:
        return Kernels(cpu_kernels())
    return Kernels()
