"""A tier behind host memory: what it holds, and how fast it was."""

from collections import deque

from sojourn.engine.techniques.tiers.cost import Speed
from sojourn.engine.techniques.tiers.index import TierIndex
from sojourn.engine.techniques.tiers.store import BlockStore, PeerBlockStore, Questions

ANNOUNCED_KEYS = 1 << 16  # of peers, while one request arrives


class SlowTier:
    """`questions` is for a store to which others write, too."""

    def __init__(self, store: BlockStore, capacity: int, questions: Questions | None = None):
        self.store = store
        self.questions = questions
        self.name = store.name
        self.index = TierIndex(store.name, capacity)
        self.reads = Speed()  # bytes
        self.reading_bytes = 0  # queued and under way
        self.num_asked = 0  # questions, likewise
        self.is_late = False  # a request gave up waiting for it, and nothing has ended since: it is not asked
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

    @property
    def is_busy(self) -> bool:
        """Requests wait for it."""
        return self.reading_bytes > 0 or self.num_asked > 0

    def has(self, key: bytes) -> bool:
        """It can be read from, and has the block."""
        return not self.is_late and self.index.lookup(key)


class PeerTier:
    """What prefill servers have for requests of this one. A failure there ends its request, if it is `strict`."""

    def __init__(self, store: PeerBlockStore, *, is_strict: bool = False):
        self.store = store
        self.books = SlowTier(store, ANNOUNCED_KEYS)
        self.is_strict = is_strict
