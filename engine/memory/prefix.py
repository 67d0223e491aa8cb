"""The prefix index: a tree of full KV blocks, found by a hash of all tokens up to their end."""

import hashlib
import heapq
from array import array
from collections.abc import Sequence

from sojourn.engine.memory.cached_block import CachedBlock
from sojourn.engine.memory.eviction.lru import Lru
from sojourn.engine.memory.eviction.policy import EvictionPolicy


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block: of its own tokens and, through `parent`, of all tokens before it (b"" at the root)."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def root_hash(salt: str, adapter: str = "") -> bytes:
    """Parent of a sequence's first block. Sequences with different salts or adapters never share a block."""
    if not adapter:
        return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""
    # No salt that a client may choose gives the hash of an adapter.
    named = hashlib.blake2b(adapter.encode(), digest_size=16).digest()
    return hashlib.blake2b(salt.encode(), digest_size=16, key=named, person=b"adapter").digest()


class PrefixIndex:
    """The full blocks by their prefix, and the order in which idle ones are evicted.

    Only leaves are evicted: a block whose children are cached would make them unreachable. Which leaf goes first is the
    policy's choice. Time is a counter, so that the same calls always evict the same blocks.
    """

    def __init__(self, policy: EvictionPolicy | None = None) -> None:
        self.policy = policy or Lru(0)
        self._nodes: dict[bytes, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        # Idle leaves of each queue, as (idle_since, block); stale entries are skipped.
        self._candidates: list[list[tuple[int, int]]] = [[] for _ in range(self.policy.num_queues)]
        self._time = 0

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest cached prefix of a chain of hashes."""
        blocks = []
        for key in hashes:
            node = self._nodes.get(key)
            if node is None:
                break
            blocks.append(node.block)
        return blocks

    def find(self, key: bytes) -> int | None:
        node = self._nodes.get(key)
        return None if node is None else node.block

    def insert(self, key: bytes, parent: bytes | None, block: int) -> None:
        """Adds a block that is full and being read. Its prefix is not known yet, but what stands before it is."""
        above = None if parent is None else self._nodes[parent]
        node = CachedBlock(block, above, key)
        if above is not None:
            above.children += 1
            node.depth = above.depth + 1
        self._nodes[key] = self._by_block[block] = node
        self.policy.inserted(node, self._time)

    def holds(self, block: int) -> bool:
        return block in self._by_block

    def busy(self, block: int) -> None:
        """A request reads the idle block from now on: it cannot be evicted."""
        node = self._by_block[block]
        if node.reused_at_age is None and node.idle_since is not None:
            node.reused_at_age = self._time - node.idle_since
        node.idle_since = None
        self.policy.became_busy(node)

    def used(self, blocks: Sequence[int]) -> None:
        """The request that found these blocks was admitted: where they had been idle, that is a use."""
        for block in blocks:
            node = self._by_block.get(block)
            if node is not None and node.reused_at_age is not None:
                self.policy.used(node, node.reused_at_age)
                node.reused_at_age = None

    def idle(self, block: int) -> None:
        self._time += 1
        node = self._by_block[block]
        node.idle_since = self._time
        for moved in self.policy.became_idle(node, self._time):
            self._time += 1
            moved.idle_since = self._time
            self._offer(moved)
        self._offer(node)

    def evict(self) -> CachedBlock | None:
        """Forgets the idle leaf that the policy gives up; None where there is none."""
        heads = [self._head(queue) for queue in range(len(self._candidates))]
        if not any(heads):
            return None
        return self._forget(0 if len(heads) == 1 else self.policy.victim_queue(heads, self._time))

    def expire(self) -> list[CachedBlock]:
        """Forgets the idle leaves that are too old for a policy with a clock."""
        expired = []
        for queue in range(len(self._candidates)):
            while (head := self._head(queue)) is not None and self.policy.is_expired(head):
                expired.append(self._forget(queue))
        return expired

    def _head(self, queue: int) -> CachedBlock | None:
        """The oldest idle leaf of a queue."""
        candidates = self._candidates[queue]
        while candidates:
            idle_since, block = candidates[0]
            node = self._by_block.get(block)
            if node is not None and node.idle_since == idle_since and not node.children and node.queue == queue:
                return node
            heapq.heappop(candidates)
        return None

    def _forget(self, queue: int) -> CachedBlock:
        """The head of a queue, which `_head` has just found."""
        node = self._by_block.pop(heapq.heappop(self._candidates[queue])[1])
        del self._nodes[node.key]
        self.policy.evicted(node, self._time)
        if node.parent is not None:
            node.parent.children -= 1
            self._offer(node.parent)
        return node

    def _offer(self, node: CachedBlock) -> None:
        if node.idle_since is None or node.children:
            return
        candidates = self._candidates[node.queue]
        heapq.heappush(candidates, (node.idle_since, node.block))
        if len(candidates) > 2 * len(self._nodes) + 64:  # mostly stale: nothing was evicted for long
            candidates[:] = [
                (n.idle_since, n.block)
                for n in self._nodes.values()
                if n.idle_since is not None and n.children == 0 and n.queue == node.queue
            ]
            heapq.heapify(candidates)
