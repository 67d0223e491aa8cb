"""The life of cached blocks, from the events that store and remove them: residency, evictors, and what more room saves.

Events do not show hits. They show what a cache without eviction would not have computed: a block that is stored again
after it was removed. And they show what a larger pool would have kept. A pool that evicts the least recently used block
holds the blocks that were used last; a larger one holds the same and those that were evicted last (the inclusion
property of Mattson et al., IBM Systems Journal 9, 1970). So the blocks that were removed and not stored again, in the
order of their removal, are the continuation of the pool. A block that lies at place d there when it is stored again
would have been held by a pool with more than d further blocks.

Exact for pools that evict by last use and are full. Cannot tell: hits, so no hit rate without somebody who counts
lookups; smaller pools, since their order of uses is that of hits; who read a block.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from sojourn.metrics.memory.lru_stack import LruStack
from sojourn.metrics.records import KvEventRecord
from sojourn.metrics.statistics.log_histogram import LogHistogram

REMEMBERED = 1_048_576  # removed blocks that are known, of some 300 bytes; the oldest go first, and are counted
MOST_OWNERS = 4096  # whose evictions are counted by name
NAMELESS = "others"
CHAIN = "chain "  # a sequence without a name is called so, with the beginning of the hash of its first block


class Life(msgspec.Struct, gc=False):
    """A block that is held. Several copies count as one block: a server may compute the same block twice at once."""

    stored_ns: int
    owner: str
    copies: int = 1


class Death(msgspec.Struct, gc=False):
    """A block that was removed, and not stored again yet."""

    removed_ns: int
    owner: str  # of its last life
    taker: str  # who needed the room


class PoolHistory:
    """One medium of one server. Owns what is held, and what was removed last; `apply` takes events in their order."""

    def __init__(
        self, remembered: int = REMEMBERED, most_owners: int = MOST_OWNERS, histogram: type[LogHistogram] = LogHistogram
    ):
        self.block_size = 0
        self.begin_ns: int | None = None
        self.end_ns = 0
        self.stored = 0  # blocks, again or for the first time
        self.stored_twice = 0  # blocks that were stored while the same block was held
        self.stored_again = (
            0  # blocks stored after they had been removed: a cache without eviction would not have computed them
        )
        self.unplaced = 0  # of `stored_again`, those whose place is not known: messages were lost in between
        self.removed = 0
        self.removed_unknown = 0  # whose store was not seen: it was before the record, or its message was lost
        self.cleared = 0  # times that all blocks were given up at once: a restart, or a reset
        self.lost = 0  # messages
        self.forgotten = 0  # removed blocks that are no longer remembered
        self.peak = 0  # the most blocks that were held at once, copies included
        self.lives = histogram()  # ns from store to removal, of blocks with both
        self.gaps = histogram()  # ns from removal to the next store
        self.places = LogHistogram()  # of blocks that were stored again: others that were removed later, and not back
        self.taken_by: Counter[str] = Counter()  # who needed the room → blocks
        self.missed_by: Counter[tuple[str, str]] = Counter()  # (who needed the room, who stored it again) → blocks
        self._remembered = remembered
        self._most_owners = most_owners
        self._held: dict[int, Life] = {}
        self._copies = 0
        self._removed = LruStack()
        self._deaths: dict[int, Death] = {}
        self._uncertain: dict[int, None] = {}  # were held or removed when messages were lost
        self._leaving: list[int] = []  # removed since the last store, and nobody known who needed the room
        self._made_room: Counter[str] = (
            Counter()
        )  # blocks removed by the requests that are known to have needed the room

    @property
    def held(self) -> int:
        """Blocks, copies included."""
        return self._copies

    @property
    def seconds(self) -> float:
        return 0.0 if self.begin_ns is None else (self.end_ns - self.begin_ns) / 1e9

    def apply(self, event: KvEventRecord) -> None:
        if self.begin_ns is None:
            self.begin_ns = event.ns
        self.end_ns = max(self.end_ns, event.ns)
        if event.kind == "stored":
            self._store(event)
        elif event.kind == "removed":
            self._remove(event)
        elif event.kind == "cleared":
            self._settle(NAMELESS)
            self.cleared += 1
            self._forget_all()
        else:
            self.lost += event.lost
            self._settle(NAMELESS)
            self._doubt()

    def saved_by(self, more_blocks: float) -> int:
        """Blocks of those that were stored again that a pool with so many more blocks would have held."""
        return self.places.below(more_blocks)

    def _store(self, event: KvEventRecord) -> None:
        owner = self._owner(event)
        # What this store displaced was still there when its blocks were looked up.
        displaced = self._made_room.pop(event.request, 0) if event.request else len(self._leaving)
        self._settle(owner)
        self._place(event.hashes, displaced)
        self.block_size = self.block_size or event.block_size
        for block in event.hashes:
            self.stored += 1
            life = self._held.get(block)
            self._copies += 1
            if life is not None:
                life.copies += 1
                self.stored_twice += 1
                continue
            self._held[block] = Life(event.ns, owner)
            if block in self._uncertain:
                del self._uncertain[block]
                self.stored_again += 1
                self.unplaced += 1
            elif (death := self._deaths.pop(block, None)) is not None:
                self.stored_again += 1
                self._removed.remove(block)
                self.gaps.add(event.ns - death.removed_ns)
                self._count(self.missed_by, (death.taker, owner), (NAMELESS, NAMELESS))
        self.peak = max(self.peak, self._copies)

    def _place(self, blocks: Sequence[int], displaced: int) -> None:
        for block in dict.fromkeys(blocks):
            if block in self._deaths:
                self.places.add(max(0, self._removed.above(block) - displaced))

    def _remove(self, event: KvEventRecord) -> None:
        taker = event.request or ""
        if taker:
            self._made_room[taker] += len(event.hashes)
            if len(self._made_room) > MOST_OWNERS:
                del self._made_room[next(iter(self._made_room))]
        for block in event.hashes:
            self.removed += 1
            life = self._held.get(block)
            if life is None:
                self.removed_unknown += 1
                self._uncertain.pop(block, None)
                self._die(block, event.ns, "", taker)
                continue
            life.copies -= 1
            self._copies -= 1
            if life.copies:
                continue
            del self._held[block]
            self.lives.add(event.ns - life.stored_ns)
            self._die(block, event.ns, life.owner, taker)

    def _die(self, block: int, now_ns: int, owner: str, taker: str) -> None:
        self._removed.push(block)
        self._deaths[block] = Death(now_ns, owner, taker)
        if taker:
            self._count(self.taken_by, taker, NAMELESS)
        else:
            self._leaving.append(block)
            if len(self._leaving) > self._remembered:
                self._settle(NAMELESS)
        while len(self._removed) > self._remembered:
            del self._deaths[self._removed.pop_oldest()]  # type: ignore[arg-type]
            self.forgotten += 1

    def _settle(self, taker: str) -> None:
        """Who stores next is who needed the room of what was removed just before."""
        for block in self._leaving:
            death = self._deaths.get(block)
            if death is not None and not death.taker:
                death.taker = taker
            self._count(self.taken_by, taker, NAMELESS)
        self._leaving = []

    def _owner(self, event: KvEventRecord) -> str:
        """The request; else the session; else the chain: the first block of its sequence, as far as it is known."""
        if event.request or event.session:
            return event.request or event.session or ""
        above = None if event.parent is None else self._held.get(event.parent) or self._deaths.get(event.parent)
        if above is not None and above.owner.startswith(CHAIN):
            return above.owner
        first = event.parent if event.parent is not None else event.hashes[0] if event.hashes else 0
        return f"{CHAIN}{first & (1 << 64) - 1:016x}"[: len(CHAIN) + 8]

    def _doubt(self) -> None:
        """Messages were lost: what was held may be gone, and what was removed may be back."""
        for block in (*self._held, *self._deaths):
            self._uncertain[block] = None
        while len(self._uncertain) > self._remembered:
            del self._uncertain[next(iter(self._uncertain))]
            self.forgotten += 1
        self._forget_all()

    def _forget_all(self) -> None:
        self._held.clear()
        self._deaths.clear()
        self._copies = 0
        self._removed = LruStack()
        self._leaving = []
        self._made_room.clear()

    def _count(self, counter: Counter, key: object, nameless: object) -> None:
        """A counter with a bound: who comes when it is full counts among the others."""
        counter[key if key in counter or len(counter) < self._most_owners else nameless] += 1


class BlockHistory:
    """The pools of one or several servers, by server and medium."""

    def __init__(self, most_owners: int = MOST_OWNERS, histogram: type[LogHistogram] = LogHistogram):
        self.pools: dict[tuple[str, str], PoolHistory] = {}
        self._most_owners, self._histogram = most_owners, histogram

    def apply(self, events: Iterable[KvEventRecord]) -> None:
        for event in events:
            server = event.server or ""
            if event.kind in ("cleared", "lost"):
                for (name, _), pool in self.pools.items():
                    if name == server:
                        pool.apply(event)
                continue
            key = (server, event.medium)
            pool = self.pools.get(key)
            if pool is None:
                pool = self.pools[key] = PoolHistory(REMEMBERED, self._most_owners, self._histogram)
            pool.apply(event)
