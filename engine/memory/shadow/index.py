"""The shadow index: the prefix tree as it would be without eviction, and which sizes of pool would still hold what.

It is a stack in the sense of Mattson et al. (IBM Systems Journal 9, 1970), with what differs from a plain list of
recent uses: blocks that live requests hold are on top whatever their age and take up room in a pool of any size; a
block enters when it is full, and counts as used when its last reader leaves; within a chain the last block ages first.
So what a pool of a given size holds of the idle blocks are always the most recent ones, and of a smaller pool fewer of
them: one list and one boundary a size is all, and moving a boundary costs one step for each block that it passes. For
the size of the pool itself this is what the pool does, block for block. Distances are those of the sampled blocks among
each other (metrics/memory/lru_stack.py).

Everything is exact; nothing is sampled but the distances. Memory is bounded: besides a pool's worth of blocks at most
`remembered` are known, of some 420 bytes. The oldest go first, which are leaves, and are counted: from then on
"infinite" means so many. A size of more blocks than are known has no curve.
"""

from array import array
from collections.abc import Sequence

import msgspec

from sojourn.engine.memory.prefix import chain_hash
from sojourn.metrics.memory.branches import TAILS, Branches, branches_of, with_branch, without_branch
from sojourn.metrics.memory.known_prompts import packed_tokens
from sojourn.metrics.memory.lru_stack import LruStack
from sojourn.metrics.memory.prefix_outcomes import RATIOS

REMEMBERED = 262_144
REAL = RATIOS.index(1.0)


class ShadowNode(msgspec.Struct, gc=False, eq=False):
    """A block that was computed once. The pool sizes from number `smallest_size` on hold it.

    The garbage collector skips nodes: to walk through all of them took seconds. A dropped node is in no cycle, for it
    is in no list.
    """

    key: bytes
    parent: "ShadowNode | None"
    tokens: bytes = b""  # its own
    writer: str = ""  # the request that filled it first; its blocks share the string
    too_small_below: int = 0  # sizes below this number are too small for it and all blocks used since
    lost_below: int = 0  # sizes below this number had lost it at its last lookup, and it was not computed again since
    readers: int = 0  # live requests that read it
    pending_recomputes: int = 0  # live requests that compute it again: larger sizes hold it for them
    newer: "ShadowNode | None" = None  # neighbours in the list of idle blocks
    older: "ShadowNode | None" = None
    filled_ns: int = 0
    idle_ns: int = 0  # when its last reader left
    evicted_ns: int = 0
    evicted_by: str = ""  # the request that needed its room
    followed_by: Branches = None  # known tokens behind it: of blocks, and ends of sequences
    ends: tuple[bytes, ...] = ()  # of sequences, oldest first
    end_writers: tuple[str, ...] = ()  # the request of each of them

    @property
    def smallest_size(self) -> int:
        return max(self.too_small_below, self.lost_below)


class ShadowIndex:
    """Owns the nodes. An argument `occupied` is the number of blocks that live requests hold."""

    def __init__(self, num_blocks: int, block_size: int, remembered: int = REMEMBERED):
        self.block_size = block_size
        self.capacity = num_blocks + remembered
        self.sizes = [size for size in (int(ratio * num_blocks) for ratio in RATIOS) if size <= self.capacity]
        self.num_dropped = 0  # blocks, since the start
        self.num_extra_readers = 0  # readers beyond the first of each block, of all blocks
        # One block in so many is sampled: some 256 to 511 of a pool, but never fewer than one in 128.
        self.sampled_one_in = 1 << max(0, min(7, (num_blocks // 256).bit_length() - 1))
        self._mask = self.sampled_one_in - 1
        self._nodes: dict[bytes, ShadowNode] = {}
        self._roots: dict[bytes, ShadowNode] = {b"": ShadowNode(b"", None)}
        self._ring = ring = ShadowNode(b"", None, too_small_below=len(RATIOS) + 1)  # between the newest and the oldest
        ring.newer = ring.older = ring
        self._idle = [0] * (len(self.sizes) + 1)  # listed blocks, by the smallest size that holds them
        self._oldest = [ring] * len(self.sizes)  # within each size
        self.sampled = LruStack()  # keys of the sampled blocks in the list
        self.num_listings = 0  # changes with every block that enters the list

    def __len__(self) -> int:
        return len(self._nodes)

    def find(self, key: bytes) -> ShadowNode | None:
        return self._nodes.get(key)

    def root(self, key: bytes) -> ShadowNode:
        """The parent of the first blocks of sequences with one salt. Each call needs a `leave_root`."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = ShadowNode(key, None)
        root.readers += 1
        return root

    def leave_root(self, root: ShadowNode) -> None:
        root.readers -= 1
        self._drop_root(root)

    def is_sampled(self, node: ShadowNode) -> bool:
        return node.key[0] & self._mask == 0

    def distance(self, node: ShadowNode, occupied: int) -> int:
        """Other blocks that are in use, or that were given back after this one, which is sampled and in the list."""
        return self.sampled.above(node.key) * self.sampled_one_in + occupied

    def read(self, node: ShadowNode) -> None:
        """One more request holds the block."""
        if node.newer is not None:
            self._unlist(node)
        elif node.readers:
            self.num_extra_readers += 1
        node.readers += 1

    def leave(self, node: ShadowNode, now_ns: int) -> None:
        node.readers -= 1
        if node.readers:
            self.num_extra_readers -= 1
        else:
            node.idle_ns = now_ns
            self._list(node)

    def refresh(self, chain: Sequence[bytes]) -> None:
        """The pool counts these blocks as used by a request that was then refused. Their idle times stay."""
        for key in reversed(chain):
            node = self._nodes.get(key)
            if node is not None and node.newer is not None:
                self._unlist(node)
                self._list(node)

    def expect(self, node: ShadowNode) -> None:
        """A request computes the block again, which the pool has lost: larger sizes hold it for that request."""
        if node.newer is not None:
            self._unlist(node)
        node.pending_recomputes += 1

    def give_up(self, node: ShadowNode) -> None:
        """The request of `expect` ended before it computed the block."""
        node.pending_recomputes -= 1
        if node.pending_recomputes == 0 and node.readers == 0 and node.newer is None:
            self._list(node)

    def fill(self, key: bytes, parent: ShadowNode, tokens: bytes, now_ns: int, writer: str) -> ShadowNode:
        """The request `writer`, which reads all blocks before this one, computed it and reads it: pools of all sizes
        hold it."""
        node = self._nodes.get(key)
        if node is None:
            if len(self._nodes) >= self.capacity:
                self._forget_oldest()
            node = self._nodes[key] = ShadowNode(key, parent, tokens, writer, filled_ns=now_ns)
            parent.followed_by = with_branch(parent.followed_by, tokens)
        self.read(node)
        if node.lost_below > REAL:
            node.filled_ns = now_ns
        node.lost_below = 0
        node.evicted_by = ""
        return node

    def end(self, parent: ShadowNode, tokens: Sequence[int], writer: str) -> None:
        """The sequence of `writer` ended with fewer tokens than a block. The last TAILS of such ends are remembered of
        a prefix."""
        if not tokens or (parent.parent is None and parent.key and not parent.followed_by):
            return  # of a salt that has no block yet, nothing would ever be dropped
        end = packed_tokens(tokens)
        if end in parent.ends:
            return
        parent.followed_by = with_branch(parent.followed_by, end)
        if len(parent.ends) == TAILS:
            parent.followed_by = without_branch(parent.followed_by, parent.ends[0])
        parent.ends = (*parent.ends[1 - TAILS :], end)
        parent.end_writers = (*parent.end_writers[1 - TAILS :], writer)

    def writer_behind(self, parent: ShadowNode, branch: bytes) -> str | None:
        """The request that first went on with `branch` behind the parent: with a block, or with its end."""
        if branch in parent.ends:
            return parent.end_writers[parent.ends.index(branch)]
        node = self._nodes.get(chain_hash(parent.key, array("i", branch)))
        return node and node.writer

    def evict_to(self, occupied: int) -> list[ShadowNode]:
        """Each size evicts what does not fit beside the `occupied` blocks of live requests.

        Returns what the pool itself evicts, oldest first.
        """
        evicted: list[ShadowNode] = []
        idle, oldest, cached = self._idle, self._oldest, 0
        for level, size in enumerate(self.sizes):
            cached += idle[level]
            excess = min(occupied + cached - size, cached)
            if excess <= 0:
                continue
            node, left = oldest[level], excess
            while left:
                at, floor = node.too_small_below, node.lost_below
                if at < level:  # smaller sizes, which have room for what they had lost, must not outlast this one
                    oldest[at:level] = [node.newer] * (level - at)
                if floor <= level:
                    idle[at if at > floor else floor] -= 1
                    left -= 1
                    if level == REAL:
                        evicted.append(node)
                node.too_small_below = level + 1
                node = node.newer
            oldest[level] = node
            idle[level + 1] += excess
            cached -= excess
        return evicted

    def _list(self, node: ShadowNode) -> None:
        """Its last reader left: it is the most recent idle block."""
        ring, oldest = self._ring, self._oldest
        self.num_listings += 1
        older = ring.older
        node.newer, node.older = ring, older
        ring.older = older.newer = node
        self._idle[node.lost_below] += 1
        for size in range(len(oldest)):
            if oldest[size] is not ring:
                break
            oldest[size] = node
        if node.key[0] & self._mask == 0:
            self.sampled.push(node.key)

    def _unlist(self, node: ShadowNode) -> None:
        newer, older, level = node.newer, node.older, node.too_small_below
        if older.too_small_below > level:  # else it is the oldest of no size
            for size in range(level, len(self._oldest)):
                if self._oldest[size] is node:
                    self._oldest[size] = newer
        newer.older, older.newer = older, newer
        node.newer = node.older = None
        if level > node.lost_below:
            node.lost_below = level
        node.too_small_below = 0
        self._idle[node.lost_below] -= 1
        if node.key[0] & self._mask == 0:
            self.sampled.remove(node.key)

    def _forget_oldest(self) -> None:
        node = self._ring.newer
        if node is self._ring or node.pending_recomputes:
            return
        self._unlist(node)
        del self._nodes[node.key]
        self.num_dropped += 1
        parent = node.parent
        parent.followed_by = without_branch(parent.followed_by, node.tokens)
        if parent.parent is None:
            self._drop_root(parent)

    def _drop_root(self, root: ShadowNode) -> None:
        """Forgets a salt without known blocks and live requests."""
        if root.key and not root.readers and len(branches_of(root.followed_by)) == len(root.ends):
            self._roots.pop(root.key, None)
