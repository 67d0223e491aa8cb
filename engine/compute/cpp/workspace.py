"""Memory for a kernel's results that stays from step to step."""

import torch


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
