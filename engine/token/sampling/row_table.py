"""Device tables with one row for each live request that needs one: a step gathers rows instead of building them."""

import torch


class RowTable:
    """Rows [width] of one type, by request. Grows by doubling; a given row is dirty until its owner fills it."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device, num_rows: int = 0):
        self.values = torch.empty((num_rows, width), dtype=dtype, device=device)
        self._free = list(range(num_rows - 1, -1, -1))

    def take(self) -> int:
        if not self._free:
            old = len(self.values)
            grown = self.values.new_empty((max(4, 2 * old), self.values.shape[1]))
            grown[:old] = self.values
            self.values = grown
            self._free = list(range(len(grown) - 1, old - 1, -1))
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self._free.append(row)

    @property
    def used(self) -> int:
        return len(self.values) - len(self._free)
