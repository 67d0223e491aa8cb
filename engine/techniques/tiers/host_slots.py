"""Copies of KV blocks between the device and host memory, which is the tier below it and the way to the slower ones.

A slot of host memory holds a block of all layers in one piece: files and sockets take it as it is.
"""

import math
import time
from collections.abc import Sequence
from itertools import accumulate

import torch

from sojourn.engine.compute.kv_cache import KVCache, parts, zeros
from sojourn.engine.techniques.tiers.transfers import Transfers
from sojourn.metrics.errors import ModelError

ALIGNED = 16  # bytes: where a part of a slot begins


class HostSlots:
    """`num_slots` blocks in host memory: pages that take memory as they fill, or pinned memory beside a GPU.

    Raises ModelError if there is not enough.
    """

    def __init__(self, cache: KVCache, num_slots: int, memory: memoryview | None = None):
        """`memory` [num_slots * block_bytes] uint8, if other processes read it."""
        # [num_layers, planes, num_blocks, heads, tokens, ...] each, as in memory: a block has one piece in each plane.
        self._parts = [part.transpose(3, 4) for part in parts(cache)]
        assert all(part.is_contiguous() for part in self._parts), "a block of a plane is one piece"
        self._device = self._parts[0].device
        self._shapes = [(*part.shape[:2], *part.shape[3:]) for part in self._parts]
        sizes = slot_sizes(self._parts)
        self.block_bytes = sum(sizes)
        self.num_slots = num_slots
        if memory is None:
            slots = _host_memory(num_slots * self.block_bytes, self._device)
        else:
            slots = torch.frombuffer(memory, dtype=torch.uint8)
        slots = slots.view(num_slots, self.block_bytes)
        self._bytes = memoryview(slots.numpy()).cast("B")
        self._views = []  # of each part all slots: [num_slots, numbers of a block]
        begins = accumulate(sizes, initial=0)
        for part, begin, shape in zip(self._parts, begins, self._shapes, strict=False):
            nbytes = math.prod(shape) * part.itemsize
            self._views.append(slots[:, begin : begin + nbytes].view(part.dtype))
        self._side = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def slot_bytes(self, slot: int) -> memoryview:
        """The bytes of a slot, to read a file into or to write from."""
        return self._bytes[slot * self.block_bytes : (slot + 1) * self.block_bytes]

    def store(self, stores: Sequence[tuple[int, int]]) -> int:
        """Device blocks to slots. Returns the nanoseconds; on CUDA copies are queued, and that is what they take."""
        began_ns = time.monotonic_ns()
        if stores:
            self._store(stores)
        return time.monotonic_ns() - began_ns

    def load(self, loads: Sequence[tuple[int, int]]) -> int:
        """Slots to device blocks. Returns nanoseconds as `store` does."""
        began_ns = time.monotonic_ns()
        if loads:
            self._load(loads)
        return time.monotonic_ns() - began_ns

    def move(self, transfers: Transfers) -> tuple[int, int]:
        """Stores and loads that no step makes. Returns the nanoseconds of the loads and of the stores."""
        store_ns, load_ns = self.store(transfers.stores), self.load(transfers.loads)
        self.finish_stores()
        return load_ns, store_ns

    def finish_stores(self) -> None:
        """Until the host may read the slots of all stores."""
        if self._side is not None:
            self._side.synchronize()

    def _store(self, stores: Sequence[tuple[int, int]]) -> None:
        if self._side is None:
            for part, view, shape in zip(self._parts, self._views, self._shapes, strict=True):
                for block, slot in stores:
                    view[slot].view(shape).copy_(part[:, :, block])
            return
        # Gathered on the step's stream, so that the step may overwrite the blocks, and copied beside it.
        blocks = torch.tensor([block for block, _ in stores], device=self._device)
        gathered = [part.index_select(2, blocks).movedim(2, 0).flatten(1) for part in self._parts]
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            for rows, view in zip(gathered, self._views, strict=True):
                rows.record_stream(self._side)
                for row, (_, slot) in zip(rows, stores, strict=True):
                    view[slot].copy_(row, non_blocking=True)

    def _load(self, loads: Sequence[tuple[int, int]]) -> None:
        if self._side is None:
            for part, view, shape in zip(self._parts, self._views, self._shapes, strict=True):
                for slot, block in loads:
                    part[:, :, block].copy_(view[slot].view(shape))
            return
        # Copied beside the step before; the step's stream waits for them, and spreads them over the planes.
        blocks = torch.tensor([block for _, block in loads], device=self._device)
        with torch.cuda.stream(self._side):
            fresh = [torch.empty((len(loads), view.shape[1]), dtype=view.dtype, device=self._device)
                     for view in self._views]  # fmt: skip
            for rows, view in zip(fresh, self._views, strict=True):
                for row, (slot, _) in zip(rows, loads, strict=True):
                    row.copy_(view[slot], non_blocking=True)
        current = torch.cuda.current_stream(self._device)
        current.wait_stream(self._side)
        for part, rows, shape in zip(self._parts, fresh, self._shapes, strict=True):
            rows.record_stream(current)
            part.index_copy_(2, blocks, rows.unflatten(1, shape).movedim(0, 2))


def slot_sizes(cache_parts: Sequence[torch.Tensor]) -> list[int]:
    """Bytes that a block of each part takes in a slot."""
    sizes = [part[:, :, 0].numel() * part.itemsize for part in cache_parts]
    return [-(-size // ALIGNED) * ALIGNED for size in sizes]


def _host_memory(nbytes: int, device: torch.device) -> torch.Tensor:
    try:
        if device.type == "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        return zeros((nbytes,), torch.uint8, torch.device("cpu"))
    except RuntimeError as error:
        raise ModelError(f"the KV tier in host memory does not fit; lower kv_host_gib ({error})") from None
