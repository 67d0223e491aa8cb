"""Blocks of KV cache and their owners. Pure bookkeeping: no tensors, no clock."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sojourn.engine.memory.eviction.policy import EvictionPolicy
from sojourn.engine.memory.kv_events import KVEventLog
from sojourn.engine.memory.prefix import PrefixIndex
from sojourn.engine.memory.window import HOLE, FreedWindow


class BlockCounts(NamedTuple):
    """Blocks by state; the three sum to the pool."""

    free: int  # holds nothing
    active: int  # read or written by a live request
    reusable: int  # a cached prefix without readers


class BlockPool:
    """Owns every KV block: hands them out, shares them by reference count, takes them back."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        eviction: EvictionPolicy | None = None,
        window: FreedWindow | None = None,
        events: KVEventLog | None = None,
    ):
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.window = window  # sequences give their blocks behind it back
        self.events = events  # of the blocks that can be found; None: nobody wants to know
        self.evicted_blocks = 0  # since the start
        self.slots_written = 0  # positions in active blocks that hold a token: all of a findable one
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: low indices first
        self.num_active = 0
        self._shared_ends: dict[int, int] = {}  # block → how many of its positions forks of its writer read
        self._index = PrefixIndex(eviction)
        self.on_evict: Callable[[int, bytes], None] | None = None  # hears of each cached block before it is reused

    @property
    def evicts_lru(self) -> bool:
        return self._index.policy.name == "lru"

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones, and cached ones without readers."""
        return self.num_blocks - self.num_active

    def counts(self) -> BlockCounts:
        free = len(self._free)
        return BlockCounts(free, self.num_active, self.num_blocks - free - self.num_active)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest known prefix. They stay evictable until `take`.

        With a window only those that are read from there on, and holes for the others, which may be gone.
        """
        if not self.prefix_caching:
            return []
        if self._index.policy.has_clock:
            self._expire()
        return self._index.match(hashes) if self.window is None else self._match_window(hashes, self.window)

    def _match_window(self, hashes: Sequence[bytes], window: FreedWindow) -> list[int]:
        blocks = [self._index.find(key) for key in hashes]
        count = window.longest_prefix([block is not None for block in blocks], self.block_size)
        begin, end = window.hole(count * self.block_size, self.block_size)
        return [HOLE if block is None or begin <= index < end else block for index, block in enumerate(blocks[:count])]

    def take(self, blocks: Sequence[int]) -> None:
        """Adds a reader to cached blocks."""
        for block in blocks:
            if block == HOLE:
                continue
            if self._references[block] == 0:
                self.num_active += 1
                self.slots_written += self.block_size
                self._index.busy(block)
            self._references[block] += 1

    def used(self, blocks: Sequence[int]) -> None:
        """The request that took these cached blocks was admitted."""
        if self._index.policy.counts_uses:
            self._index.used(blocks)

    def take_from(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Reads the first `num_tokens` positions of a live sequence's blocks together with it."""
        self.take(blocks)
        if end := num_tokens % self.block_size:
            self._shared_ends[blocks[-1]] = end

    def wrote(self, num_tokens: int) -> None:
        """So many positions more of active blocks hold a token."""
        self.slots_written += num_tokens

    def num_readers(self, block: int) -> int:
        return self._references[block]

    def writable(self, block: int) -> bool:
        """It has one reader, and cannot be found by its prefix."""
        return self._references[block] == 1 and not self._index.holds(block)

    def available_without(self, victims: Sequence[Sequence[int]], read: Sequence[int]) -> int:
        """`available`, if the sequences `victims` were released and the cached or live blocks `read` were taken."""
        released: Counter[int] = Counter()
        for blocks, count in Counter(map(tuple, victims)).items():  # forks of one prompt hold the same
            for block in blocks:
                released[block] += count
        del released[HOLE]
        freed = sum(1 for block, count in released.items() if self._references[block] == count)
        claimed = sum(1 for block in read if block != HOLE and self._references[block] == released[block])
        return self.available + freed - claimed

    def allocate(self, count: int) -> list[int] | None:
        """`count` empty blocks, evicting cached ones as needed, or None (and no change) where they do not fit."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                evicted = self._index.evict()
                assert evicted is not None, "a block that is neither free nor active must be evictable"
                block = evicted.block
                self._evicted(block, evicted.key)
            self._references[block] = 1
            blocks.append(block)
        self.num_active += count
        return blocks

    def publish(self, block: int, key: bytes, parent: bytes | None) -> int:
        """Makes a block that is now full and computed findable by its prefix; `parent` is None for the first.

        Where another block has the same tokens already, that one is taken and this one freed: a request that reads a
        block reads all before it, so that nothing above a live block is ever evicted. Returns the block to read from
        now on.
        """
        assert self._references[block] > 0, "only a block in use is published"
        if not self.prefix_caching:
            return block
        known = self._index.find(key)
        if known is None:
            # Behind a window a block is read without those before it, so each may be evicted by itself.
            self._index.insert(key, parent if self.window is None else None, block)
            return block
        if known != block:
            self.take([known])
            self.release([block], self.block_size)
        return known

    def release(self, blocks: Sequence[int], num_tokens: int) -> None:
        """Gives back one reference to each block of a sequence, which has written `num_tokens` positions of them.

        The last block goes first, so that leaves age first.
        """
        size, ends = self.block_size, self._shared_ends
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            if block == HOLE:
                continue
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was given back twice"
            findable = self._index.holds(block)
            written = size if findable else min(size, max(0, num_tokens - index * size))
            if self._references[block]:
                if block in ends and not findable:
                    self.slots_written -= max(0, written - ends[block])
                continue
            self.num_active -= 1
            self.slots_written -= written
            ends.pop(block, None)
            if findable:
                self._index.idle(block)
            else:
                self._free.append(block)

    def take_events(self) -> bytes | None:
        """What changed since the last call, for routers; None where nothing did, or nobody wants to know."""
        return None if self.events is None else self.events.take()

    def forget_cached(self) -> None:
        """Gives back every cached block while no request has one: their contents go."""
        assert not self.num_active, "no request lives"
        while (node := self._index.evict()) is not None:
            self._evicted(node.block, node.key)
            self._free.append(node.block)

    def _expire(self) -> None:
        for node in self._index.expire():
            self._evicted(node.block, node.key)
            self._free.append(node.block)

    def _evicted(self, block: int, key: bytes) -> None:
        self.evicted_blocks += 1
        if self.events is not None:
            self.events.removed(key)
        if self.on_evict is not None:
            self.on_evict(block, key)
