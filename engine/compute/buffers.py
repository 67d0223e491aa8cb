"""Copies between host and device that wait for nothing, and memory for results that stays from step to step."""

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device. A GPU reads pinned memory: else the host would wait for the step under way."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the host, valid when the device's work up to here is done."""
    if tensor.is_cpu:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class Workspace:
    """float32 memory that grows by doubling: steps of like size allocate nothing."""

    __slots__ = ("_memory", "_view")

    def __init__(self) -> None:
        self._memory = torch.empty(0)
        self._view = self._memory

    def shaped(self, *shape: int) -> torch.Tensor:
        """The memory in this shape, valid until the next call."""
        if self._view.shape != shape:
            size = torch.Size(shape).numel()
            if self._memory.numel() < size:
                self._memory = torch.empty(max(size, 2 * self._memory.numel()))
            self._view = self._memory[:size].view(shape)
        return self._view
