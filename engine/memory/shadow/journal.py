"""What became of every prompt token at its first query, and how long cached blocks live, from what requests do to them.

**Outcomes.** Each prompt token gets exactly one, in this order of precedence, and they sum to the prompt. A prompt of P
tokens could at best reuse (P - 1) // block_size blocks, since the last token is always computed for its logits.

1. `hit`: its block was cached, and the request may read the cache.
2. `miss_disabled`: its block was computed before, as were all before it, but `prefix_caching` is off or the request
   wants log-probabilities of its prompt.
3. `miss_evicted`: the same, but the block was evicted, or one before it was (then also if another request is
   computing it again at this moment). `evicted_by` tells whose need for room took it.
4. `miss_in_flight`: behind those, whole blocks that nobody computed before and another running request computes now.
5. `miss_sub_block`: behind those, tokens that some earlier sequence had in the same place, but that fill no reusable
   block: ends of sequences, beginnings of blocks that go on otherwise, and the last block of a prompt known whole.
6. `miss_diverged`: the rest, if at least one known block stands before it and some known sequence goes on otherwise
   at its first token; `miss_cold`: the rest else, never seen, or new text behind the end of what is known.

`infinite_hit_tokens` = hit + miss_disabled + miss_evicted. `diverged_at` is the number of tokens shared with known
sequences where one of them goes on otherwise, also within the first block; None if none is shared or none goes on.
Known is what was computed and left the step; other cache salts know nothing of each other. Of ends the last 64 behind
one prefix are remembered.

*Example*, blocks of 4: `abcdefghij` was served, so that `abcd` and `efgh` are blocks and `ij` an end. Then
`abcdefghiXYZ` may reuse two blocks of the three: if `efgh` was evicted since, it is 4 hit, 4 miss_evicted, 1
miss_sub_block (`i`) and 3 miss_diverged, with `diverged_at` 9. And `abcdefghijKL` would be 8 hit, 2 miss_sub_block
and 2 miss_cold, for `KL` is what comes next in the same conversation.

Forks (n > 1) read their leader's prompt: it is booked once, for the leader. A preempted request asks again without
being booked: what it computes again is `recomputed_tokens`.
"""

from dataclasses import dataclass, field
from typing import Any

from engine.memory.block_pool import BlockPool
from engine.memory.journal import BlockTimes, Reader
from engine.memory.prefix import root_hash
from engine.memory.shadow import branches
from engine.memory.shadow.index import REAL, Known, Shadow
from metrics.memory.prefix_outcomes import PrefixReport


@dataclass(slots=True)
class _Trail:
    """The blocks of a live request in the shadow index."""

    root: Known
    read: list[Known]  # its first full blocks, all that it holds
    known: list[Known] = field(default_factory=list)  # ... and those behind that the pool lost: it computes them again
    expects: list[bytes] = field(default_factory=list)  # keys of all full blocks of its prompt, if it is in flight
    unready: bool = False  # a smaller pool would have lost some of `read`: not there before something new is filled


class ShadowJournal:
    """Keeps the shadow index beside a pool. With prefix caching off it tells what a cache of this size would do.

    Events wait, each with what will have changed by then, until `flush` books them in their order: no token waits for
    the index.
    """

    def __init__(self, pool: BlockPool, shadow: Shadow | None = None):
        self.now_ns = 0
        self.shadow = shadow or Shadow(pool.num_blocks, pool.block_size)
        self._pool = pool
        self._size = pool.block_size
        self._trails: dict[int, _Trail] = {}  # by order of the request
        self._in_flight: dict[bytes, int] = {}  # blocks never computed before → running requests that do
        self._asked = 0  # blocks of the cache that who asked last could have
        self._occupied_before = 0  # ... and blocks that others held then
        self._refreshed = (0, 0, 0)  # who was refused last, with how many blocks, and the list's state after that
        self._later: list[tuple] = []  # the method that books it, when it was, and what more that method takes
        self._times = BlockTimes()
        self.has_times = False
        self._forgotten = 0

    def asks(self, reader: Reader, count: int) -> None:
        self._put(ShadowJournal._ask, self.now_ns, count, self._pool.num_active)

    def returns(self, reader: Reader) -> None:
        self._put(ShadowJournal._return, self.now_ns, reader)

    def admitted(self, reader: Reader) -> None:
        active = self._pool.num_active
        self._put(ShadowJournal._admit, self.now_ns, reader, reader.num_tokens, reader.preemptions, active)

    def shares(self, reader: Reader, leader: Reader, count: int) -> None:
        self._put(ShadowJournal._share, self.now_ns, reader, leader, count)

    def copies(self, reader: Reader, index: int) -> None:
        self._put(ShadowJournal._copy, self.now_ns, reader, index)

    def grew(self, reader: Reader) -> None:
        self._put(ShadowJournal._squeeze, self.now_ns, reader, self._pool.num_active)

    def filled(self, reader: Reader, count: int) -> None:
        self._put(ShadowJournal._fill, self.now_ns, reader, count)

    def released(self, reader: Reader) -> None:
        self._put(ShadowJournal._release, self.now_ns, reader, reader.num_committed_tokens)

    def _put(self, *event: Any) -> None:
        self._later.append(event)

    def flush(self) -> None:
        events, self._later = self._later, []
        for book, *arguments in events:
            book(self, *arguments)

    def _ask(self, now_ns: int, count: int, active: int) -> None:
        self._asked, self._occupied_before = count, self._occupied(active)
        self.shadow.squeeze(self._occupied_before)  # sizes that were too small for what ended since

    def _return(self, now_ns: int, reader: Reader) -> None:
        count = self._asked
        if count and self._refreshed != (reader.arrival_index, count, self.shadow.num_listings):
            self.shadow.refresh(reader.block_hashes(self._size, count))
            self._refreshed = (reader.arrival_index, count, self.shadow.num_listings)

    def _admit(self, now_ns: int, reader: Reader, tokens: int, preemptions: int, active: int) -> None:
        if reader.arrival_index not in self._trails:
            self._first_blocks(reader, now_ns, tokens, preemptions)
        self._squeeze(now_ns, reader, active)

    def _share(self, now_ns: int, reader: Reader, leader: Reader, count: int) -> None:
        led = self._trails[leader.arrival_index]
        trail = self._trails.get(reader.arrival_index)
        if trail is None:
            trail = self._trails[reader.arrival_index] = _Trail(self.shadow.root(led.root.key), [])
        for node in led.read[len(trail.read) : count]:
            self.shadow.read(node)
            trail.read.append(node)

    def _copy(self, now_ns: int, reader: Reader, index: int) -> None:
        read = self._trails[reader.arrival_index].read
        if len(read) > index:
            self.shadow.leave(read.pop(), now_ns)

    def _squeeze(self, now_ns: int, reader: Reader, active: int) -> None:
        """`active` blocks are held since it grew."""
        times = self._times
        for node in self.shadow.squeeze(self._occupied(active)):
            node.evicted_by, node.evicted_ns = reader.id, now_ns
            if self._pool.prefix_caching and self.shadow.is_sampled(node):
                times.evicted_age_ns.append(now_ns - node.filled_ns)
                times.evicted_idle_ns.append(now_ns - node.idle_ns)
                self.has_times = True

    def _fill(self, now_ns: int, reader: Reader, count: int) -> None:
        trail, shadow, size = self._trails[reader.arrival_index], self.shadow, self._size
        read, known, in_flight = trail.read, trail.known, self._in_flight
        first = len(read)
        if count <= first:
            return
        if trail.unready:
            trail.unready = False
            for node in read:
                node.floor = 0
        parent = read[-1] if read else trail.root
        hashes = reader.block_hashes(size, count)
        tokens, width = branches.packed(reader.token_ids[first * size : count * size]), size * branches.TOKEN_BYTES
        for index in range(first, count):
            key, begin = hashes[index], (index - first) * width
            if index < len(known):
                known[index].awaited -= 1
            elif in_flight:
                in_flight.pop(key, None)
            parent = shadow.fill(key, parent, tokens[begin : begin + width], now_ns)
            read.append(parent)
        if self.shadow.forgotten != self._forgotten:
            self.has_times = True

    def _release(self, now_ns: int, reader: Reader, committed_tokens: int) -> None:
        trail = self._trails.pop(reader.arrival_index, None)
        if trail is None:
            return
        shadow, read = self.shadow, trail.read
        done = len(read)
        for index in range(max(done, len(trail.known)), len(trail.expects)):
            self._lands(trail.expects[index])
        for node in reversed(trail.known[done:]):
            shadow.give_up(node)
        shadow.end(read[-1] if read else trail.root, reader.token_ids[done * self._size : committed_tokens])
        for node in reversed(read):
            shadow.leave(node, now_ns)
        shadow.leave_root(trail.root)

    def take_times(self) -> BlockTimes:
        times, self._times, self.has_times = self._times, BlockTimes(), False
        times.forgotten_blocks, self._forgotten = self.shadow.forgotten - self._forgotten, self.shadow.forgotten
        return times

    def check(self, cached: dict[bytes, bool]) -> None:
        """Asserts that the books agree with each other and, with caching, with the pool's. For tests.

        `cached` says of the blocks that the pool could find whether somebody reads them.
        """
        self.flush()
        self.shadow.check(self._occupied(self._pool.num_active), cached if self._pool.prefix_caching else None)
        trails = self._trails.values()
        again = sum(max(0, len(trail.known) - len(trail.read)) for trail in trails)
        assert self.shadow.num_holds() == (sum(len(trail.read) for trail in trails), again), "a hold is lost"
        if not self._trails:
            assert not self._in_flight, "nobody computes what is in flight"

    def _occupied(self, active: int) -> int:
        """Blocks that live requests hold, of `active` ones; without caching, as they would with it: what is read
        together once.

        Forks read together even so, and are then taken off twice.
        """
        if self._pool.prefix_caching:
            return active
        return max(0, active - self.shadow.num_twins)

    def _first_blocks(self, reader: Reader, now_ns: int, tokens: int, preemptions: int) -> None:
        """What it reads of the cache, what of the known rest it computes again, and what for the first time."""
        shadow, size = self.shadow, self._size
        trail = self._trails[reader.arrival_index] = _Trail(shadow.root(root_hash(reader.cache_salt)), [])
        hashes = reader.block_hashes(size, tokens // size)
        known, hits = self._follow(hashes[: (tokens - 1) // size])
        if reader.reads_cache:
            trail.known = known
            self._read(now_ns, trail, known, self._asked if self._pool.prefix_caching else hits[REAL])
        else:
            hits = [0] * len(hits)
        if preemptions == 0 and reader.fork_of is None:
            reader.prefix_report = self._report(now_ns, reader, trail, hashes, known, hits)
        self._expect(trail, hashes, len(known))

    def _follow(self, hashes: list[bytes]) -> tuple[list[Known], list[int]]:
        """The blocks of a chain that are known, and how many of them each size would hit."""
        known: list[Known] = []
        hits: list[int] = []
        for index, key in enumerate(hashes):
            node = self.shadow.find(key)
            if node is None:
                break
            known.append(node)
            lost = node.level if node.level > node.floor else node.floor
            if lost > len(hits):
                hits += [index] * (lost - len(hits))
        hits += [len(known)] * (len(self.shadow.sizes) - len(hits))
        return known, hits

    def _read(self, now_ns: int, trail: _Trail, known: list[Known], count: int) -> None:
        """It takes the first `count` blocks from the cache, and asked for all."""
        shadow, occupied, times = self.shadow, self._occupied_before, self._times
        is_cache = self._pool.prefix_caching
        for index, node in enumerate(known):
            if node.stamp:
                times.reuse_distance_blocks.append(shadow.distance(node, occupied))
                if index < count and is_cache:
                    times.reuse_gap_ns.append(now_ns - node.idle_ns)
                self.has_times = True
            if index < count:
                occupied += node.newer is not None
                shadow.read(node)
                trail.unready |= node.floor > 0
        trail.read = known[:count]

    def _expect(self, trail: _Trail, hashes: list[bytes], num_known: int) -> None:
        """What it does not read it computes: again, or for the first time."""
        for node in trail.known[len(trail.read) :]:
            self.shadow.expect(node)
        in_flight, trail.expects = self._in_flight, hashes
        for key in hashes[max(num_known, len(trail.read)) :]:
            in_flight[key] = in_flight.get(key, 0) + 1

    def _lands(self, key: bytes) -> None:
        """A request that computed a new block is gone before it did."""
        others = self._in_flight.get(key, 0) - 1
        if others > 0:
            self._in_flight[key] = others
        elif others == 0:
            del self._in_flight[key]

    def _report(
        self, now_ns: int, reader: Reader, trail: _Trail, hashes: list[bytes], blocks: list[Known], hits: list[int]
    ) -> PrefixReport:
        size, prompt_tokens = self._size, reader.prompt_tokens
        usable = (prompt_tokens - 1) // size
        cached = self._pool.prefix_caching and reader.reads_cache
        hit = len(trail.read) if cached else 0
        known = max(hit, len(blocks))
        outcomes = {"hit": hit * size, "miss_evicted" if cached else "miss_disabled": (known - hit) * size}
        evicted_by: dict[str, int] = {}
        evicted_ago_ns = None
        for node in blocks[hit:] if cached else ():
            if evicted_ago_ns is None:
                evicted_ago_ns = now_ns - node.evicted_ns
            evicted_by[node.evicted_by] = evicted_by.get(node.evicted_by, 0) + size
        computed = known
        while computed < usable and hashes[computed] in self._in_flight:
            computed += 1
        outcomes["miss_in_flight"] = (computed - known) * size
        shared, leaves = 0, False
        begin = computed * size
        if computed == known:
            parent = blocks[-1] if blocks else trail.root
            if parent.followed_by:
                rest = branches.packed(reader.token_ids[begin : min(begin + size, prompt_tokens)])
                shared, leaves = branches.follow(parent.followed_by, rest)
        outcomes["miss_sub_block"] = shared
        until = begin + shared
        leaves = leaves and 0 < until < prompt_tokens
        outcomes["miss_diverged" if leaves and known else "miss_cold"] = prompt_tokens - until
        return PrefixReport(
            prefix_outcomes={outcome: tokens for outcome, tokens in outcomes.items() if tokens},
            infinite_hit_tokens=known * size,
            diverged_at=until if leaves else None,
            evicted_by=evicted_by,
            evicted_ago_ns=evicted_ago_ns,
            resized_hit_tokens=[blocks * size for blocks in hits],
        )
