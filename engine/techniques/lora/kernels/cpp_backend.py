"""The deltas on a CPU: `cpp/lora.cpp` does the work, also from within the joined layers."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sojourn.engine.compute.cpp.extension import Library
from sojourn.engine.techniques.lora.kernels.backend import AdapterParts, LoraPart, LoraTile

POINTER, INT = ctypes.c_void_p, ctypes.c_int64
LANES = 16  # inputs of A are filled up to a multiple
PANEL = 64  # outputs of B that lie together
MOST_PARTS = 4  # modules of one linear layer


class _Part(ctypes.Structure):
    _fields_ = (
        ("a", POINTER), ("b", POINTER), ("rank", INT), ("begin", INT), ("out_features", INT),
        ("scale", ctypes.c_float), ("is_bfloat16", ctypes.c_int32),
    )  # fmt: skip


class _Slot(ctypes.Structure):
    _fields_ = (("num_parts", INT), ("parts", _Part * MOST_PARTS))


class _Linear(ctypes.Structure):
    _fields_ = (("slots", POINTER), ("in_features", INT), ("out_features", INT))


class _Step(ctypes.Structure):
    _fields_ = (("tiles", POINTER), ("num_tiles", INT))


@dataclass(frozen=True, slots=True)
class PackedPart:
    begin: int
    out_features: int
    a: torch.Tensor  # [rank, in_features, rounded up]
    b: torch.Tensor  # [out_features / 64, rank, 64]
    scale: float


PackedAdapter = dict[int, list[PackedPart]]


class CppLora:
    """float32 activations. Matrices stay in bfloat16 if they are stored so, which is exact, and are float32 otherwise.

    A slot refers to the adapter in host memory: installing it copies nothing.
    """

    tile_tokens = 16
    parameter_bytes = 4

    def __init__(self, library: Library, max_loras: int, sizes: Sequence[tuple[int, int]]):
        """`sizes`: inputs and outputs of each linear layer, by its index."""
        self._add = library.function("sojourn_lora", POINTER, POINTER, POINTER, POINTER)
        self._slots = [(_Slot * max_loras)() for _ in sizes]
        self._linears = (_Linear * len(sizes))(
            *(_Linear(ctypes.addressof(slots), *size) for slots, size in zip(self._slots, sizes, strict=True))
        )
        self._installed: list[PackedAdapter] = [{} for _ in range(max_loras)]  # the slots point to their memory
        self._tiles = torch.empty(0, dtype=torch.int64)
        self._step = _Step()
        self._step_address = ctypes.addressof(self._step)

    def address(self, index: int) -> int:
        """Of a linear layer, for cpp/layers.cpp."""
        return ctypes.addressof(self._linears) + index * ctypes.sizeof(_Linear)

    @property
    def step_address(self) -> int | None:
        """Of the tiles; None where the step has none."""
        return self._step_address if self._step.num_tiles else None

    def pack(self, adapter: AdapterParts) -> PackedAdapter:
        return {index: [_packed(part) for part in parts] for index, parts in adapter.items()}

    def install(self, slot: int, packed: PackedAdapter) -> None:
        for index, slots in enumerate(self._slots):
            parts = packed.get(index, ())
            slots[slot].num_parts = len(parts)
            for place, part in enumerate(parts):
                slots[slot].parts[place] = _Part(
                    part.a.data_ptr(), part.b.data_ptr(), len(part.a), part.begin, part.out_features, part.scale,
                    part.a.dtype == torch.bfloat16,
                )  # fmt: skip
        self._installed[slot] = packed

    def begin(self, tiles: Sequence[LoraTile]) -> None:
        self._step.num_tiles = len(tiles)
        if tiles:
            self._tiles = torch.tensor(tiles, dtype=torch.int64)
            self._step.tiles = self._tiles.data_ptr()

    def set_decodes(self, slots: Sequence[int], size: int) -> None:
        raise AssertionError("a CPU has no graphs")

    begin_decodes = set_decodes

    def add(self, index: int, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self._step.num_tiles:
            x = x.contiguous()
            assert y.is_contiguous() and x.dtype == y.dtype == torch.float32, "the kernel reads and writes memory"
            self._add(self.address(index), self._step_address, x.data_ptr(), y.data_ptr())
        return y


def _packed(part: LoraPart) -> PackedPart:
    dtype = torch.bfloat16 if part.a.dtype == part.b.dtype == torch.bfloat16 else torch.float32
    a = F.pad(part.a.to(dtype), (0, -part.a.shape[1] % LANES)).contiguous()
    b = F.pad(part.b.to(dtype), (0, 0, 0, -len(part.b) % PANEL))
    panels = b.unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    return PackedPart(part.begin, len(part.b), a, panels, part.scale)
