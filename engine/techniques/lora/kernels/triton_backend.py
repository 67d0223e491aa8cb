"""The deltas on a GPU: stacked matrices of all slots, and two launches a linear layer (triton/lora.py)."""

from collections.abc import Sequence

import torch

from sojourn.engine.compute.buffers import to_device
from sojourn.engine.compute.triton.lora import COLUMNS, add_lora
from sojourn.engine.techniques.lora.kernels.backend import AdaptedLinear, AdapterParts, LoraPart, LoraTile

LEAST_RANK = 16  # of a product of tiles
FEW_ROWS = 16  # of a tile, where no tile of the step has more
MOST_DECODES = 4096  # bound of the setting max_num_seqs

PackedPart = tuple[int, LoraPart]  # which of the linear layer's modules it is


class TritonLora:
    """A slot keeps zeros where an adapter has nothing. Nothing waits for the device."""

    tile_tokens = 64

    def __init__(
        self, max_loras: int, max_rank: int, linears: Sequence[AdaptedLinear], dtype: torch.dtype, device: torch.device
    ):
        self.parameter_bytes = dtype.itemsize
        self._dtype, self._device = dtype, device
        rank = max(LEAST_RANK, 1 << (max_rank - 1).bit_length())
        zeros = {"dtype": dtype, "device": device}
        self._begins = [linear.begins for linear in linears]
        self._a = [torch.zeros(max_loras, len(one.begins) * rank, one.in_features, **zeros) for one in linears]
        self._b = [torch.zeros(max_loras, one.out_features, rank, **zeros) for one in linears]
        self._scales = [torch.zeros(max_loras, len(linear.begins), device=device) for linear in linears]
        self._blocks = [torch.tensor(_blocks(linear), dtype=torch.int32, device=device) for linear in linears]
        self._static = torch.zeros(MOST_DECODES, 3, dtype=torch.int32, device=device)
        self._static[:, 0], self._static[:, 2] = -1, 1
        self._static[:, 1] = torch.arange(MOST_DECODES, device=device)
        self._tiles, self._rows = self._static[:0], FEW_ROWS

    def pack(self, adapter: AdapterParts) -> dict[int, list[PackedPart]]:
        pinned = self._device.type == "cuda"
        return {
            index: [(self._begins[index].index(part.begin), self._packed(part, pinned)) for part in parts]
            for index, parts in adapter.items()
        }

    def install(self, slot: int, packed: dict[int, list[PackedPart]]) -> None:
        for index, (a, b, scales) in enumerate(zip(self._a, self._b, self._scales, strict=True)):
            rank = b.shape[2]
            a[slot].zero_()
            b[slot].zero_()
            scales[slot].zero_()
            for place, part in packed.get(index, ()):
                a[slot, place * rank : place * rank + len(part.a)].copy_(part.a, non_blocking=True)
                b[slot, part.begin : part.begin + len(part.b), : len(part.a)].copy_(part.b, non_blocking=True)
                scales[slot, place].fill_(part.scale)

    def begin(self, tiles: Sequence[LoraTile]) -> None:
        if not tiles:
            self._tiles = self._static[:0]
            return
        self._tiles = to_device(torch.tensor(tiles, dtype=torch.int32), self._device)
        self._rows = FEW_ROWS if max(tile.count for tile in tiles) <= FEW_ROWS else self.tile_tokens

    def set_decodes(self, slots: Sequence[int], size: int) -> None:
        padded = torch.tensor([*slots, *[-1] * (size - len(slots))], dtype=torch.int32)
        self._static[:size, 0] = to_device(padded, self._device)

    def begin_decodes(self, size: int) -> None:
        self._tiles, self._rows = self._static[:size], FEW_ROWS

    def add(self, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if len(self._tiles):
            add_lora(
                x, y, self._a[index], self._b[index], self._scales[index], self._tiles, self._blocks[index], self._rows
            )
        return y

    def _packed(self, part: LoraPart, pinned: bool) -> LoraPart:
        a, b = (matrix.to(self._dtype).contiguous() for matrix in (part.a, part.b))
        if pinned:
            a, b = a.pin_memory(), b.pin_memory()
        return LoraPart(part.begin, a, b, part.scale)


def _blocks(linear: AdaptedLinear) -> list[tuple[int, int, int]]:
    """Begin, end and part of the column blocks of a linear layer: none holds columns of two parts."""
    ends = (*linear.begins[1:], linear.out_features)
    return [
        (at, end, part)
        for part, (begin, end) in enumerate(zip(linear.begins, ends, strict=True))
        for at in range(begin, end, COLUMNS)
    ]
