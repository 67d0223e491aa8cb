"""The low-rank deltas of several adapters in one batch: a swap point.

A linear layer's output gets scale * B(A x) more (Hu et al., 2021), with the matrices of the adapter of each token. A
layer of ours may hold several modules of a checkpoint, such as queries, keys and values: each is a part of its outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch


@dataclass(frozen=True, slots=True)
class LoraPart:
    """The matrices of one module, as stored."""

    begin: int  # of its outputs among those of the linear layer
    a: torch.Tensor  # [rank, in_features]
    b: torch.Tensor  # [out_features, rank]
    scale: float


class AdaptedLinear(NamedTuple):
    """A linear layer that adapters may change."""

    in_features: int
    out_features: int
    begins: tuple[int, ...]  # of its modules' outputs, ascending

    def slot_parameters(self, rank: int) -> int:
        """Of the matrices of an adapter with this rank: A of each module, and B behind all outputs."""
        return rank * (len(self.begins) * self.in_features + self.out_features)


class LoraTile(NamedTuple):
    """Tokens of one step, one behind the other, that use the adapter of one slot."""

    slot: int
    begin: int
    count: int


AdapterParts = dict[int, list[LoraPart]]  # index of a linear layer → its parts, by their begin


class LoraBackend(Protocol):
    """Holds the adapters in their slots, for linear layers that it knows by an index."""

    tile_tokens: int  # of a tile at most
    parameter_bytes: int  # of host memory for one number of an adapter, at most

    def pack(self, adapter: AdapterParts) -> Any:
        """The adapter in the form in which host memory keeps it. Called from any thread."""
        ...

    def install(self, slot: int, packed: Any) -> None:
        """Puts an adapter into a slot, in the order of the device's work."""
        ...

    def begin(self, tiles: Sequence[LoraTile]) -> None:
        """The next forward pass has these tiles, by their begin; tokens in none of them use no adapter."""
        ...

    def set_decodes(self, slots: Sequence[int], size: int) -> None:
        """The slots (-1: none) of a step of single tokens, which is filled up to `size`, for `begin_decodes`."""
        ...

    def begin_decodes(self, size: int) -> None:
        """As `begin`, for the single tokens of `set_decodes`. A graph that captures the pass reads their slots anew."""
        ...

    def add(self, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """y [num_tokens, out_features] with the deltas of x [num_tokens, in_features]; y may be overwritten."""
        ...


@dataclass(frozen=True, slots=True)
class LinearAdapters:
    """The adapters of one linear layer. Implements engine.compute.addition.Addition."""

    backend: LoraBackend
    index: int

    def add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.backend.add(self.index, x, y)

    @property
    def address(self) -> int:
        return self.backend.address(self.index)

    @property
    def step_address(self) -> int | None:
        return self.backend.step_address


def decode_slots(tiles: Sequence[LoraTile], size: int) -> list[int]:
    """The slot of each token (-1: none), in a step of `size` tokens."""
    slots = [-1] * size
    for tile in tiles:
        slots[tile.begin : tile.begin + tile.count] = [tile.slot] * tile.count
    return slots


def tiles_of(slots: Sequence[int], counts: Sequence[int], most: int) -> list[LoraTile]:
    """The tiles of sequences that stand one behind the other: slot (-1: none) and number of tokens of each.

    Neighbours with the same slot share tiles of `most` tokens at most.
    """
    tiles: list[LoraTile] = []
    token = 0
    for slot, count in zip(slots, counts, strict=True):
        begin, token = token, token + count
        if slot < 0:
            continue
        if tiles and tiles[-1].slot == slot and tiles[-1].begin + tiles[-1].count == begin:
            taken = min(count, most - tiles[-1].count)
            tiles[-1] = tiles[-1]._replace(count=tiles[-1].count + taken)
            begin += taken
        tiles += [LoraTile(slot, at, min(most, token - at)) for at in range(begin, token, most)]
    return tiles
