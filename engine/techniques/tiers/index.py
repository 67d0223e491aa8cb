"""Which blocks a tier holds. Pure bookkeeping: no tensors, no files, no clock."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class TierBlock:
    """A block in a tier. It can be read once it is `ready`, and goes only while nothing pins it."""

    slot: int
    is_ready: bool = False  # else it is being written
    pins: int = 0  # transfers under way, and requests that will read it soon
    is_lost: bool = False  # nobody finds it; it goes with its last pin
    came_from: str = ""  # the slower tier that it was read from, until a request has used it


class TierIndex:
    """The blocks of one tier by their key, least recently used first.

    A store has two phases, so that a block is never found while it is half-written: `prepare_store` takes a slot, and
    `complete_store` makes it findable. A load pins the block from `prepare_load` to `complete_load`.
    """

    def __init__(self, name: str, capacity: int):
        self.name = name
        self.capacity = capacity  # blocks
        self.evicted: list[bytes] = []  # keys, since their owner last cleared it
        self._blocks: dict[bytes, TierBlock] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._evictable: OrderedDict[bytes, None] = OrderedDict()  # ready and without pins
        self.on_change: Callable[[bytes, bool], None] | None = None  # a block can be read from now on, or no longer

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        """Whether the block is there, or is being written."""
        return key in self._blocks

    def __getitem__(self, key: bytes) -> TierBlock:
        return self._blocks[key]

    def lookup(self, key: bytes) -> bool:
        """Whether the block can be read."""
        block = self._blocks.get(key)
        return block is not None and block.is_ready and not block.is_lost

    def prepare_store(self, key: bytes) -> int | None:
        """A slot to write the block to; None where it is known, or where nothing can make room for it."""
        if key in self._blocks:
            return None
        if not self._free:
            if not self._evictable:
                return None
            old, _ = self._evictable.popitem(last=False)
            self._free.append(self._blocks.pop(old).slot)
            self.evicted.append(old)
            self._changed(old, is_readable=False)
        slot = self._free.pop()
        self._blocks[key] = TierBlock(slot)
        return slot

    def complete_store(self, key: bytes, *, ok: bool) -> None:
        """The block is written, and can be read from now on; or the write failed, and the slot is free again."""
        block = self._blocks[key]
        assert not block.is_ready, "a block is written once"
        if not ok:
            assert not block.pins, "nothing reads a block that is being written"
            self._remove(key)
            return
        block.is_ready = True
        self._evictable[key] = None
        self._changed(key, is_readable=True)

    def prepare_load(self, key: bytes) -> int:
        """The slot to read a block from, which can be read. It stays until `complete_load`."""
        block = self._blocks[key]
        assert block.is_ready, "a half-written block is never read"
        block.pins += 1
        self._evictable.pop(key, None)
        return block.slot

    def complete_load(self, key: bytes) -> None:
        block = self._blocks[key]
        block.pins -= 1
        assert block.pins >= 0, "a block was given back twice"
        if not block.pins and block.is_lost:
            self._remove(key)
        elif not block.pins:
            self._evictable[key] = None

    def touch(self, key: bytes) -> None:
        """The block was used, wherever: it is the most recent one."""
        if key in self._evictable:
            self._evictable.move_to_end(key)

    def forget(self, key: bytes) -> None:
        """The block turned out to be lost or damaged. Nothing else may read it."""
        block = self._blocks.get(key)
        if block is None or not block.is_ready or block.is_lost:
            return
        if block.pins:
            block.is_lost = True
        else:
            del self._evictable[key]
            self._remove(key)
        self._changed(key, is_readable=False)

    def readable(self) -> list[bytes]:
        """The keys of all blocks that can be read."""
        return [key for key in self._blocks if self.lookup(key)]

    def _remove(self, key: bytes) -> None:
        self._free.append(self._blocks.pop(key).slot)

    def _changed(self, key: bytes, *, is_readable: bool) -> None:
        if self.on_change is not None:
            self.on_change(key, is_readable)
