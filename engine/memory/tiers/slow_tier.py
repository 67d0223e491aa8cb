"""A tier behind host memory with its books, and the counts of any tier."""

from collections import deque
from dataclasses import dataclass

from engine.memory.tiers.cost import Speed
from engine.memory.tiers.index import TierIndex
from engine.memory.tiers.store import BlockStore


@dataclass(slots=True)
class TierCounts:
    """Of one tier, since the last `take_counts`; `blocks` is the state."""

    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_ns: int = 0
    store_ns: int = 0
    failures: int = 0  # reads and writes that failed, and damaged blocks
    refused: int = 0  # stores for which there was no room
    blocks: int = 0


class SlowTier:
    """A store behind host memory: what it holds, and how fast it was."""

    def __init__(self, store: BlockStore, capacity: int):
        self.store = store
        self.name = store.name
        self.index = TierIndex(store.name, capacity)
        self.reads = Speed()  # bytes
        self.reading_bytes = 0  # queued and under way
        self.num_writing = 0
        self.backlog: deque[bytes] = deque()  # keys in host memory that wait until fewer are being written
        for key in store.known():
            if self.index.prepare_store(key) is not None:
                self.index.complete_store(key, ok=True)
        self.remove_evicted()

    def remove_evicted(self) -> None:
        for key in self.index.evicted:
            self.store.remove(key)
        self.index.evicted.clear()
