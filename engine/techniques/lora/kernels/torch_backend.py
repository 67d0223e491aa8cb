"""The reference: one product after the other, in torch, on any device."""

from collections.abc import Sequence

import torch

from sojourn.engine.techniques.lora.kernels.backend import AdapterParts, LoraTile, tiles_of


class TorchLora:
    """Computes in the dtype of the activations."""

    tile_tokens = 1 << 30

    def __init__(self, max_loras: int, dtype: torch.dtype, device: torch.device):
        self._dtype, self._device = dtype, device
        self.parameter_bytes = dtype.itemsize
        self._decodes: list[int] = []
        self._slots: list[AdapterParts] = [{} for _ in range(max_loras)]
        self._tiles: Sequence[LoraTile] = ()

    def pack(self, adapter: AdapterParts) -> AdapterParts:
        return {
            index: [type(p)(p.begin, p.a.to(self._dtype), p.b.to(self._dtype), p.scale) for p in parts]
            for index, parts in adapter.items()
        }

    def install(self, slot: int, packed: AdapterParts) -> None:
        self._slots[slot] = {
            index: [type(p)(p.begin, p.a.to(self._device), p.b.to(self._device), p.scale) for p in parts]
            for index, parts in packed.items()
        }

    def begin(self, tiles: Sequence[LoraTile]) -> None:
        self._tiles = tiles

    def set_decodes(self, slots: Sequence[int], size: int) -> None:
        self._decodes = [*slots, *[-1] * (size - len(slots))]

    def begin_decodes(self, size: int) -> None:
        """Cannot be captured: the host reads the slots."""
        self._tiles = tiles_of(self._decodes[:size], [1] * size, self.tile_tokens)

    def add(self, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for tile in self._tiles:
            rows = slice(tile.begin, tile.begin + tile.count)
            for part in self._slots[tile.slot].get(index, ()):
                outputs = slice(part.begin, part.begin + len(part.b))
                y[rows, outputs] += (x[rows] @ part.a.t() * part.scale) @ part.b.t()
        return y
