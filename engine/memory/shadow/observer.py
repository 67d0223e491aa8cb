"""The outcome of every prompt token at its first lookup, and how long cached blocks live.

**The curve** of hits over pool sizes is that of the eviction policy lru, whichever policy the pool has. Where blocks
behind a window are given back it is an approximation.

**Outcomes** are those of metrics/memory/prefix_outcomes.py. Forks (n > 1) read their leader's prompt: it counts once,
for the leader. The second lookup of a preempted request does not count: the tokens that it computes again are
`recomputed_tokens`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.observer import BlockObserver, BlockOwner
from sojourn.engine.memory.shadow.index import REAL, ShadowIndex, ShadowNode
from sojourn.engine.memory.shadow.request_path import RequestPath
from sojourn.metrics.memory.branches import follow_branches
from sojourn.metrics.memory.known_prompts import SALT_BYTES, TOKEN_BYTES, KnownPrompts, packed_tokens, salted
from sojourn.metrics.memory.prefix_outcomes import PrefixReport
from sojourn.metrics.memory.prompt_repeats import Allowance, PromptRepeats
from sojourn.metrics.records.step import Reuse

PrefixSource = tuple[int, str | None]  # shared tokens, and the request that has them


def _booked_by_flush(book: Callable[..., None]) -> Callable[..., None]:
    """The event waits until `flush`. Then `book` gets the time and the number of active blocks that it had."""

    def wait(self: "ShadowObserver", *arguments: Any) -> None:
        self._events.append((book, self.now_ns, self._pool.num_active, *arguments))

    return wait


class ShadowObserver(BlockObserver):
    """Keeps the shadow index beside a pool. With prefix caching off it computes what a cache of this size would do.

    Events wait until `flush` books them in their order: no token waits for the index.
    """

    def __init__(self, pool: BlockPool, shadow: ShadowIndex | None = None):
        super().__init__()
        self.shadow = shadow or ShadowIndex(pool.num_blocks, pool.block_size)
        self._pool = pool
        self._size = pool.block_size
        self._paths: dict[int, RequestPath] = {}  # by arrival index
        self._live = KnownPrompts()  # of live requests: the index knows only full blocks
        self._repeats, self._repeats_allowed = PromptRepeats(), Allowance()
        self._in_flight: dict[bytes, int] = {}  # blocks never computed before → running requests that do
        self._loaded: Sequence[str] = ()  # the tiers of blocks that the request of the last lookup loads
        self._num_cached = 0  # blocks that the last lookup found
        self._occupied_before = 0  # blocks of other requests at the last lookup
        self._refreshed = (0, 0, 0)  # the last failed lookup: request, blocks, and the list's state after it
        self._events: list[tuple] = []  # the function that books it, and its arguments
        self._times = Reuse()
        self.has_times = False
        self._num_dropped = 0
        # Another policy evicts other blocks than the index, which has the order of their last use.
        self.wants_evictions = not pool.evicts_lru

    def flush(self) -> None:
        events, self._events = self._events, []
        for book, *arguments in events:
            book(self, *arguments)

    @_booked_by_flush
    def on_lookup(self, now_ns: int, active: int, count: int) -> None:
        self._num_cached, self._occupied_before = count, self._occupied(active)
        self.shadow.evict_to(self._occupied_before)  # for requests that ended since

    @_booked_by_flush
    def on_lookup_failed(self, now_ns: int, active: int, owner: BlockOwner) -> None:
        count = self._num_cached
        if count and self._refreshed != (owner.arrival_index, count, self.shadow.num_listings):
            self.shadow.refresh([
                key for index, key in enumerate(owner.block_hashes(self._size, count)) if index not in self._hole(count)
            ])  # fmt: skip
            self._refreshed = (owner.arrival_index, count, self.shadow.num_listings)

    @_booked_by_flush
    def on_load(self, now_ns: int, active: int, owner: BlockOwner, tiers: Sequence[str]) -> None:
        self._loaded = tiers

    @_booked_by_flush
    def on_admit(self, now_ns: int, active: int, owner: BlockOwner, num_tokens: int, is_first: bool) -> None:
        if owner.arrival_index not in self._paths:
            self._first_blocks(owner, now_ns, num_tokens, is_first)
        self._evict_for(owner, now_ns, active)
        self._loaded = ()

    @_booked_by_flush
    def on_share(self, now_ns: int, active: int, owner: BlockOwner, leader: BlockOwner, count: int) -> None:
        led = self._paths[leader.arrival_index]
        path = self._paths.get(owner.arrival_index)
        if path is None:
            path = self._paths[owner.arrival_index] = RequestPath(self.shadow.root(led.root.key), [])
        for node in led.read[len(path.read) : count]:
            if node is not None:
                self.shadow.read(node)
            path.read.append(node)

    @_booked_by_flush
    def on_copy(self, now_ns: int, active: int, owner: BlockOwner, index: int) -> None:
        read = self._paths[owner.arrival_index].read
        if len(read) > index:
            copied = read.pop()
            assert copied is not None, "what is written next is behind no window"
            self.shadow.leave(copied, now_ns)

    @_booked_by_flush
    def on_grow(self, now_ns: int, active: int, owner: BlockOwner) -> None:
        self._evict_for(owner, now_ns, active)

    def _evict_for(self, owner: BlockOwner, now_ns: int, active: int) -> None:
        """`active` blocks are in use since the owner grew."""
        evicted = self.shadow.evict_to(self._occupied(active))
        if not self.wants_evictions:
            self._book_evictions(evicted, owner, now_ns)

    @_booked_by_flush
    def on_evict(self, now_ns: int, active: int, owner: BlockOwner, keys: Sequence[bytes]) -> None:
        self._book_evictions([node for key in keys if (node := self.shadow.find(key)) is not None], owner, now_ns)

    def _book_evictions(self, evicted: Sequence[ShadowNode], owner: BlockOwner, now_ns: int) -> None:
        times = self._times
        for node in evicted:
            node.evicted_by, node.evicted_ns = owner.id, now_ns
            if self._pool.prefix_caching and self.shadow.is_sampled(node):
                times.evicted_age_ns.append(now_ns - node.filled_ns)
                times.evicted_idle_ns.append(now_ns - node.idle_ns)
                self.has_times = True

    @_booked_by_flush
    def on_fill(self, now_ns: int, active: int, owner: BlockOwner, count: int) -> None:
        path, shadow, size = self._paths[owner.arrival_index], self.shadow, self._size
        read, known, in_flight = path.read, path.known, self._in_flight
        first = len(read)
        if count <= first:
            return
        if path.partly_lost:
            path.partly_lost = False
            for node in filter(None, read):
                node.lost_below = 0
        parent = path.last
        hashes = owner.block_hashes(size, count)
        tokens, width = packed_tokens(owner.token_ids[first * size : count * size]), size * TOKEN_BYTES
        for index in range(first, count):
            key, begin = hashes[index], (index - first) * width
            if index < len(known):
                known[index].pending_recomputes -= 1
            elif in_flight:
                in_flight.pop(key, None)
            parent = shadow.fill(key, parent, tokens[begin : begin + width], now_ns, owner.id)
            read.append(parent)
        if self.shadow.num_dropped != self._num_dropped:
            self.has_times = True

    @_booked_by_flush
    def on_leave_window(self, now_ns: int, active: int, owner: BlockOwner, begin: int, end: int) -> None:
        read = self._paths[owner.arrival_index].read
        for index in range(begin, min(end, len(read))):
            node, read[index] = read[index], None
            if node is not None:
                self.shadow.leave(node, now_ns)

    @_booked_by_flush
    def on_release(self, now_ns: int, active: int, owner: BlockOwner, committed_tokens: int) -> None:
        path = self._paths.pop(owner.arrival_index, None)
        if path is None:
            return
        shadow, read = self.shadow, path.read
        done = len(read)
        for index in range(max(done, len(path.known)), len(path.prompt_keys)):
            self._drop_in_flight(path.prompt_keys[index])
        for node in reversed(path.known[done:]):
            shadow.give_up(node)
        shadow.end(path.last, owner.token_ids[done * self._size : committed_tokens], owner.id)
        if path.prompt:
            self._live.remove(path.prompt, owner.id)
        for node in filter(None, reversed(read)):
            shadow.leave(node, now_ns)
        shadow.leave_root(path.root)

    def take_times(self) -> Reuse:
        times, self._times, self.has_times = self._times, Reuse(), False
        num_dropped = self.shadow.num_dropped
        times.shadow_evicted_blocks, self._num_dropped = num_dropped - self._num_dropped, num_dropped
        return times

    def _occupied(self, active: int) -> int:
        """Blocks of live requests, of `active` ones. Without caching: as with it, where shared blocks count once. Forks
        share blocks even so, which are then subtracted twice."""
        if self._pool.prefix_caching:
            return active
        return max(0, active - self.shadow.num_extra_readers)

    def _first_blocks(self, owner: BlockOwner, now_ns: int, tokens: int, is_first: bool) -> None:
        """Splits the prefix: blocks to read, known blocks to compute again, and new ones."""
        shadow, size = self.shadow, self._size
        path = self._paths[owner.arrival_index] = RequestPath(shadow.root(owner.root_hash), [])
        hashes = owner.block_hashes(size, tokens // size)
        known, hits = self._follow(hashes[: (tokens - 1) // size])
        if owner.reads_cache:
            path.known = known
            self._read(now_ns, path, known, self._num_cached if self._pool.prefix_caching else hits[REAL])
        else:
            hits = [0] * len(hits)
        if owner.fork_of is None:
            path.prompt = salted(path.root.key, packed_tokens(owner.token_ids[: owner.prompt_tokens]))
            if is_first:
                owner.parts["prefix"] = self._report(now_ns, owner, path, hashes, known, hits)
            self._live.add(path.prompt, owner.id)
        self._expect(path, hashes, len(known))

    def _follow(self, hashes: list[bytes]) -> tuple[list[ShadowNode], list[int]]:
        """The known blocks of a chain, and how many of them each size would hit."""
        known: list[ShadowNode] = []
        hits: list[int] = []
        for index, key in enumerate(hashes):
            node = self.shadow.find(key)
            if node is None:
                break
            known.append(node)
            hits += [index] * (node.smallest_size - len(hits))
        hits += [len(known)] * (len(self.shadow.sizes) - len(hits))
        if (window := self._pool.window) is not None:
            levels = range(len(self.shadow.sizes))
            held = [[node.smallest_size <= level for node in known] for level in levels]
            hits = [window.longest_prefix(cached, self._size) for cached in held]
        return known, hits

    def _read(self, now_ns: int, path: RequestPath, known: list[ShadowNode], count: int) -> None:
        """The request looked up the `known` blocks, and takes the first `count` from the cache."""
        shadow, occupied, times = self.shadow, self._occupied_before, self._times
        is_cache = self._pool.prefix_caching
        unread = self._hole(count)
        for index, node in enumerate(known):
            if index in unread:
                continue
            if node.key in shadow.sampled:
                times.reuse_distance_blocks.append(shadow.distance(node, occupied))
                if index < count and is_cache:
                    times.reuse_gap_ns.append(now_ns - node.idle_ns)
                self.has_times = True
            if index < count:
                occupied += node.newer is not None
                shadow.read(node)
                path.partly_lost |= node.lost_below > 0
        path.read = [None if index in unread else node for index, node in enumerate(known[:count])]

    def _hole(self, count: int) -> range:
        """Of so many blocks that a request found, those behind its window, which it does not read."""
        window = self._pool.window
        return range(0) if window is None else range(*window.hole(count * self._size, self._size))

    def _expect(self, path: RequestPath, hashes: list[bytes], num_known: int) -> None:
        """The request computes the blocks that it does not read: again, or for the first time."""
        for node in path.known[len(path.read) :]:
            self.shadow.expect(node)
        in_flight, path.prompt_keys = self._in_flight, hashes
        for key in hashes[max(num_known, len(path.read)) :]:
            in_flight[key] = in_flight.get(key, 0) + 1

    def _drop_in_flight(self, key: bytes) -> None:
        """A request ended before it computed a new block."""
        others = self._in_flight.get(key, 0) - 1
        if others > 0:
            self._in_flight[key] = others
        elif others == 0:
            del self._in_flight[key]

    def _report(
        self,
        now_ns: int,
        owner: BlockOwner,
        path: RequestPath,
        hashes: list[bytes],
        blocks: list[ShadowNode],
        hits: list[int],
    ) -> PrefixReport:
        size, prompt_tokens = self._size, owner.prompt_tokens
        usable = (prompt_tokens - 1) // size
        cached = self._pool.prefix_caching and owner.reads_cache
        hit = len(path.read) if cached else 0
        outcomes = {"hit": hit * size}
        for tier in self._loaded:
            outcomes[f"hit_{tier}"] = outcomes.get(f"hit_{tier}", 0) + size
            hit += 1
        known = max(hit, len(blocks))
        outcomes["miss_evicted" if cached else "miss_disabled"] = (known - hit) * size
        evicted_by, evicted_ns = _evictors(blocks[hit:] if cached else [], size)
        computed = known
        while computed < usable and hashes[computed] in self._in_flight:
            computed += 1
        outcomes["miss_in_flight"] = (computed - known) * size
        begin = len(blocks) * size
        parent = blocks[-1] if blocks else path.root
        rest = packed_tokens(owner.token_ids[begin : min(begin + size, prompt_tokens)])
        followed, leaves, branch = follow_branches(parent.followed_by, rest)
        source = self._source(path, parent, branch, begin + followed)
        repeated, movable = self._repeated(now_ns, path, prompt_tokens, source[0])
        is_end_known = computed == known == len(blocks)  # else blocks of an earlier process came from a tier
        shared = followed if is_end_known else 0
        leaves, begin = leaves and is_end_known, computed * size
        outcomes["miss_sub_block"] = shared
        until = begin + shared
        leaves = leaves and 0 < until < prompt_tokens
        outcomes["miss_diverged" if leaves and known else "miss_cold"] = prompt_tokens - until
        return PrefixReport(
            prefix_outcomes={outcome: tokens for outcome, tokens in outcomes.items() if tokens},
            infinite_hit_tokens=known * size,
            diverged_at=until if leaves else None,
            evicted_by=evicted_by,
            evicted_ago_ns=None if evicted_ns is None else now_ns - evicted_ns,
            resized_hit_tokens=[blocks * size for blocks in hits],
            prefix_source=source[1],
            prefix_shared_tokens=source[0],
            repeated_tokens=repeated,
            movable_tokens=movable,
        )

    def _repeated(
        self, now_ns: int, path: RequestPath, prompt_tokens: int, shared_tokens: int
    ) -> tuple[int | None, int | None]:
        """Repeated and movable tokens of a prompt; None of one that is not looked at."""
        if not self._repeats_allowed.takes(now_ns, prompt_tokens):
            return None, None
        tokens = np.frombuffer(path.prompt, np.int32, offset=SALT_BYTES)
        return self._repeats.add(tokens, int.from_bytes(path.root.key[:7], "little"), shared_tokens)

    def _source(self, path: RequestPath, parent: ShadowNode, branch: bytes | None, known_tokens: int) -> PrefixSource:
        """`known_tokens` of the prompt are in the index: up to the parent, and from there along the branch."""
        live = self._live.longest_shared(path.prompt)
        if not known_tokens or live[0] > known_tokens:
            return live
        return known_tokens, parent.writer if branch is None else self.shadow.writer_behind(parent, branch)


def _evictors(nodes: Sequence[ShadowNode], block_size: int) -> tuple[dict[str, int], int | None]:
    """Tokens by the request that needed their room, which what expired has not; and when the first one was evicted."""
    found: dict[str, int] = {}
    first_ns = None
    for node in nodes:
        if node.evicted_by:
            found[node.evicted_by] = found.get(node.evicted_by, 0) + block_size
            first_ns = node.evicted_ns if first_ns is None else first_ns
    return found, first_ns
