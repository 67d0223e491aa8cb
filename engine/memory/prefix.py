"""The prefix index: a tree of full KV blocks, found by a hash of all tokens up to their end."""

import hashlib
import heapq
from array import array
from collections.abc import Sequence

import msgspec


def chain_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash of a full block: of its own tokens and, through `parent`, of all tokens before it (b"" at the root)."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def root_hash(salt: str) -> bytes:
    """Parent of a sequence's first block. Sequences with different salts never share a block."""
    return hashlib.blake2b(salt.encode(), digest_size=16).digest() if salt else b""


class Node(msgspec.Struct, gc=False, eq=False):
    """A cached block's place in the tree. The garbage collector need not look at it: it points to the root only."""

    block: int
    parent: "Node | None"
    key: bytes
    children: int = 0
    idle_since: int | None = None  # logical time; None while a live request reads the block


class PrefixIndex:
    """The full blocks by their prefix, and the order in which idle ones are evicted.

    Only leaves are evicted, the least recently used first: a block whose children are cached would make them
    unreachable. Time is a counter, so that the same calls always evict the same blocks.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, Node] = {}
        self._by_block: dict[int, Node] = {}
        self._candidates: list[tuple[int, int]] = []  # (idle_since, block); stale entries are skipped
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
        node = Node(block, above, key)
        if above is not None:
            above.children += 1
        self._nodes[key] = self._by_block[block] = node

    def holds(self, block: int) -> bool:
        return block in self._by_block

    def busy(self, block: int) -> None:
        """A request reads the block from now on: it cannot be evicted."""
        self._by_block[block].idle_since = None

    def idle(self, block: int) -> None:
        self._time += 1
        node = self._by_block[block]
        node.idle_since = self._time
        self._offer(node)

    def evict(self) -> int | None:
        """Forgets the least recently used idle leaf and returns its block; None where there is none."""
        while self._candidates:
            idle_since, block = heapq.heappop(self._candidates)
            node = self._by_block.get(block)
            if node is None or node.idle_since != idle_since or node.children:
                continue
            del self._nodes[node.key], self._by_block[block]
            if node.parent is not None:
                node.parent.children -= 1
                self._offer(node.parent)
            return block
        return None

    def _offer(self, node: Node) -> None:
        if node.idle_since is not None and node.children == 0:
            heapq.heappush(self._candidates, (node.idle_since, node.block))
            if len(self._candidates) > 2 * len(self._nodes) + 64:  # mostly stale: nothing was evicted for long
                self._candidates = [
                    (n.idle_since, n.block)
                    for n in self._nodes.values()
                    if n.idle_since is not None and n.children == 0
                ]
                heapq.heapify(self._candidates)
