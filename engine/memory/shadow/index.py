"""The shadow index: the prefix tree as it would be without eviction, and which sizes of pool would still hold what.

It is a stack in the sense of Mattson et al. (IBM Systems Journal 9, 1970), with what differs from a plain list of
recent uses: blocks that live requests hold are on top whatever their age and take up room in a pool of any size; a
block enters when it is full, and counts as used when its last reader leaves; within a chain the last block ages first.
So what a pool of a given size holds of the idle blocks are always the most recent ones, and of a smaller pool fewer of
them: one list and one boundary a size is all, and moving a boundary costs one step for each block that it passes. For
the size of the pool itself this is what the pool does, block for block.

Everything is exact; nothing is sampled but the distances. Memory is bounded: besides a pool's worth of blocks at most
`remembered` are known, of some 400 bytes. The oldest go first, which are leaves, and are counted: from then on
"infinite" means so many. A size of more blocks than are known has no curve.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import msgspec

from engine.memory.shadow import branches
from metrics.memory.prefix_outcomes import RATIOS

REMEMBERED = 262_144
REAL = RATIOS.index(1.0)
TAILS = 64  # ends of sequences, less than a block, that are remembered behind one prefix


class Known(msgspec.Struct, gc=False, eq=False):
    """A block that was computed once. The sizes from `held_from` on hold it, by number.

    The garbage collector does not look at them, which took seconds with as many as are remembered. No cycle is left
    of one that is forgotten: it is in no list then.
    """

    key: bytes
    parent: "Known | None"
    tokens: bytes = b""  # its own
    level: int = 0  # sizes below it are too small for it and all that was used since
    floor: int = 0  # ... had lost it when it was asked for last, and it was not computed again since
    readers: int = 0  # live requests that hold it
    awaited: int = 0  # ... and that compute it again: larger sizes hold it for them
    newer: "Known | None" = None  # neighbours in the list of those that nobody holds
    older: "Known | None" = None
    stamp: int = 0  # place in that list, if it is sampled
    filled_ns: int = 0
    idle_ns: int = 0  # when its last reader left
    evicted_ns: int = 0
    evicted_by: str = ""  # who needed the room
    followed_by: branches.Branches = None  # tokens that are known to follow: of blocks, and ends of less than one
    ends: tuple[bytes, ...] = ()  # those of the latter, oldest first

    @property
    def held_from(self) -> int:
        return max(self.level, self.floor)


class Shadow:
    """Owns what is known. `occupied`, where it is asked for, is the blocks that live requests hold."""

    def __init__(self, num_blocks: int, block_size: int, remembered: int = REMEMBERED):
        self.block_size = block_size
        self.capacity = num_blocks + remembered
        self.sizes = [size for size in (int(ratio * num_blocks) for ratio in RATIOS) if size <= self.capacity]
        self.forgotten = 0  # blocks, since the start
        self.num_twins = 0  # readers beyond the first of each block, of all blocks
        # One block in so many is sampled: some 256 to 511 of a pool, but never fewer than one in 128.
        self.sampled_one_in = 1 << max(0, min(7, (num_blocks // 256).bit_length() - 1))
        self._mask = self.sampled_one_in - 1
        self._known: dict[bytes, Known] = {}
        self._roots: dict[bytes, Known] = {b"": Known(b"", None)}
        self._ring = ring = Known(b"", None, level=len(RATIOS) + 1)  # between the newest and the oldest
        ring.newer = ring.older = ring
        self._idle = [0] * (len(self.sizes) + 1)  # listed blocks, by the smallest size that holds them
        self._oldest = [ring] * len(self.sizes)  # within each size
        self._stamps: list[int] = []  # of the sampled blocks in the list, ascending
        self._clock = 0
        self.num_listings = 0  # changes with every block that enters the list

    def __len__(self) -> int:
        return len(self._known)

    @property
    def num_salts(self) -> int:
        """Salts of which a block is known, or which live requests have. For tests."""
        return len(self._roots) - 1

    def find(self, key: bytes) -> Known | None:
        return self._known.get(key)

    def root(self, key: bytes) -> Known:
        """What stands before the first blocks of sequences with one salt. Who takes it gives it back."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Known(key, None)
        root.readers += 1
        return root

    def leave_root(self, root: Known) -> None:
        root.readers -= 1
        self._drop_root(root)

    def is_sampled(self, node: Known) -> bool:
        return node.key[0] & self._mask == 0

    def distance(self, node: Known, occupied: int) -> int:
        """Other blocks that are in use, or that were given back after this one, which is sampled and in the list."""
        return (len(self._stamps) - bisect_right(self._stamps, node.stamp)) * self.sampled_one_in + occupied

    def read(self, node: Known) -> None:
        """One more request holds the block."""
        if node.newer is not None:
            self._unlist(node)
        elif node.readers:
            self.num_twins += 1
        node.readers += 1

    def leave(self, node: Known, now_ns: int) -> None:
        """One request less holds it."""
        node.readers -= 1
        if node.readers:
            self.num_twins -= 1
        else:
            node.idle_ns = now_ns
            self._list(node)

    def refresh(self, chain: Sequence[bytes]) -> None:
        """Who would read these blocks was refused, and the pool takes them for used. They are no younger for it."""
        for key in reversed(chain):
            node = self._known.get(key)
            if node is not None and node.newer is not None:
                self._unlist(node)
                self._list(node)

    def expect(self, node: Known) -> None:
        """A request computes the block again, for the pool lost it: larger ones hold it for that request."""
        if node.newer is not None:
            self._unlist(node)
        node.awaited += 1

    def give_up(self, node: Known) -> None:
        """... and ended before it did."""
        node.awaited -= 1
        if node.awaited == 0 and node.readers == 0 and node.newer is None:
            self._list(node)

    def fill(self, key: bytes, parent: Known, tokens: bytes, now_ns: int) -> Known:
        """A request that holds all before it has computed the block: pools of all sizes hold it. It reads it."""
        node = self._known.get(key)
        if node is None:
            if len(self._known) >= self.capacity:
                self._forget_oldest()
            node = self._known[key] = Known(key, parent, tokens, filled_ns=now_ns)
            parent.followed_by = branches.added(parent.followed_by, tokens)
        elif node.newer is not None:
            self._unlist(node)
        elif node.readers:
            self.num_twins += 1
        if node.floor > REAL:
            node.filled_ns = now_ns
        node.floor = 0
        node.readers += 1
        return node

    def end(self, parent: Known, tokens: Sequence[int]) -> None:
        """A sequence ended with fewer tokens than a block. The last TAILS of such ends are remembered of a prefix."""
        if not tokens or (parent.parent is None and parent.key and not parent.followed_by):
            return  # of a salt that has no block yet, nothing would ever be forgotten
        end = branches.packed(tokens)
        if end in parent.ends:
            return
        parent.followed_by = branches.added(parent.followed_by, end)
        if len(parent.ends) == TAILS:
            parent.followed_by = branches.removed(parent.followed_by, parent.ends[0])
        parent.ends = (*parent.ends[1 - TAILS :], end)

    def squeeze(self, occupied: int) -> list[Known]:
        """Live requests hold so many blocks by now: each size gives up what does not fit beside them.

        Returns what the pool itself gives up, oldest first.
        """
        evicted: list[Known] = []
        idle, oldest, held = self._idle, self._oldest, 0
        for level, size in enumerate(self.sizes):
            held += idle[level]
            excess = min(occupied + held - size, held)
            if excess <= 0:
                continue
            node, left = oldest[level], excess
            while left:
                at, floor = node.level, node.floor
                if at < level:  # smaller sizes, which have room for what they had lost, must not outlast this one
                    oldest[at:level] = [node.newer] * (level - at)
                if floor <= level:
                    idle[at if at > floor else floor] -= 1
                    left -= 1
                    if level == REAL:
                        evicted.append(node)
                node.level = level + 1
                node = node.newer
            oldest[level] = node
            idle[level + 1] += excess
            held -= excess
        return evicted

    def _list(self, node: Known) -> None:
        """Nobody holds it any more: it is the most recent one, where it is held at all."""
        ring, oldest = self._ring, self._oldest
        self.num_listings += 1
        older = ring.older
        node.newer, node.older = ring, older
        ring.older = older.newer = node
        self._idle[node.floor] += 1
        for size in range(len(oldest)):
            if oldest[size] is not ring:
                break
            oldest[size] = node
        if node.key[0] & self._mask == 0:
            self._clock += 1
            node.stamp = self._clock
            self._stamps.append(node.stamp)

    def _unlist(self, node: Known) -> None:
        newer, older, level = node.newer, node.older, node.level
        if older.level > level:  # else it is the oldest of no size
            for size in range(level, len(self._oldest)):
                if self._oldest[size] is node:
                    self._oldest[size] = newer
        newer.older, older.newer = older, newer
        node.newer = node.older = None
        if level > node.floor:
            node.floor = level
        node.level = 0
        self._idle[node.floor] -= 1
        if node.stamp:
            del self._stamps[bisect_left(self._stamps, node.stamp)]
            node.stamp = 0

    def _forget_oldest(self) -> None:
        node = self._ring.newer
        if node is self._ring or node.awaited:
            return
        self._unlist(node)
        del self._known[node.key]
        self.forgotten += 1
        parent = node.parent
        parent.followed_by = branches.removed(parent.followed_by, node.tokens)
        if parent.parent is None:
            self._drop_root(parent)

    def _drop_root(self, root: Known) -> None:
        """Forgets a salt of which no block is known and that no live request has."""
        if root.key and not root.readers and len(branches.listed(root.followed_by)) == len(root.ends):
            self._roots.pop(root.key, None)

    def num_holds(self) -> tuple[int, int]:
        """Readers of all blocks, and who awaits one. For tests."""
        blocks = self._known.values()
        return sum(node.readers for node in blocks), sum(node.awaited for node in blocks)

    def check(self, occupied: int, cached: dict[bytes, bool] | None) -> None:
        """Asserts that the list, its levels and its boundaries agree, and that the pool's own size is the pool.

        `cached` says of the blocks that the pool could find whether somebody reads them.
        """
        listed, node, level = [], self._ring.older, 0
        while node is not self._ring:
            assert node.level >= level and node.readers == 0, "a larger pool would hold less"
            level = node.level
            listed.append(node)
            node = node.older
        counts = [sum(1 for node in listed if node.held_from == size) for size in range(len(self._idle))]
        assert counts == self._idle, "blocks by level are miscounted"
        for size, oldest in enumerate(self._oldest):
            inside = [node for node in listed if node.level <= size]
            assert oldest is (inside[-1] if inside else self._ring), "a boundary is misplaced"
            inside = [node for node in inside if node.floor <= size]
            if size >= REAL and cached is not None:  # else it is told too late what it never could have run
                assert occupied + len(inside) <= self.sizes[size], "a size holds more than it has"
        assert self._stamps == [node.stamp for node in reversed(listed) if node.stamp]
        if cached is not None:
            known = self._known.items()
            held = {
                key: node.readers > 0 for key, node in known if node.readers or (node.newer and node.held_from <= REAL)
            }
            assert held == cached, "the pool's own size is not what the pool holds"
