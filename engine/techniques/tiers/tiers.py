"""The KV tiers below the device: which blocks are stored there, which are read back, and whether that pays.

Host memory is a pool of slots. It is a tier, and the way in and out of the slower ones: a block of a disk is first
read into a slot, while its request waits outside the queue, and copied to the device by the step that admits the
request. A store is a copy from the device into a slot by the next step, and then a write from there.

Copies keep these rules. Stores of a step come before copies between device blocks, those before loads, and all before
the step computes. A block is offered for a store while its contents are on the device, and no step is launched between
that and its copy. So a block that was evicted for a request is stored before the request writes it. A block that is
evicted before its load was launched is not loaded: its next owner may be a copy.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from msgspec.structs import replace

from sojourn.engine.kv_source import KVSource
from sojourn.engine.techniques.tiers.cost import LEAST_TOKENS, Choice, Speed, choose
from sojourn.engine.techniques.tiers.holds import Holds
from sojourn.engine.techniques.tiers.index import TierIndex
from sojourn.engine.techniques.tiers.request import TierReader
from sojourn.engine.techniques.tiers.slow_tier import PeerTier, SlowTier
from sojourn.engine.techniques.tiers.store import Answer, Moved
from sojourn.engine.techniques.tiers.transfers import Prefetch, TierCounts, Transfers
from sojourn.engine.techniques.tiers.waits import Waits
from sojourn.metrics.memory.kv_load import NOTHING_LOADED

CLOSE_S = 10.0
LEAST_PATIENCE_NS = 2_000_000_000  # that a request waits for reads; at most it waits as long as computing takes
PEER_PATIENCE_NS = 10_000_000_000  # that a request waits for reads from a prefill server
WRITE_SHARE = 0.5  # of the slots that may wait for a slow tier's writes: reads need slots, too


class KVTiers:
    """Owns the books of all tiers. The loop calls it between steps; only stores work beside it."""

    wants_evictions = True

    def __init__(
        self,
        host: TierIndex,
        slow: Sequence[SlowTier],
        *,
        block_size: int,
        block_bytes: int,
        store_policy: str | None,
        peer: PeerTier | None = None,
        hands_over: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ):
        """`peer`: this server reads from others; `hands_over`: others read from this one."""
        self.host = host
        self.slow = list(slow)
        self.block_bytes = block_bytes
        self.stores_on = store_policy  # fill, reuse or evict; None: only what somebody waits for
        self.holds = Holds(host)
        self._peer = peer
        self._size = block_size
        self._offers: dict[bytes, int] = {}  # key → device block, until the next launch
        self._loads: dict[int, tuple[bytes, int]] = {}  # device block → key and slot, until then
        self.waits = Waits(clock)
        # Asked of a shared store: the request, its chain up to there, and the keys.
        self._questions: dict[int, tuple[TierReader, Prefetch, list[tuple[bytes, SlowTier | None]], list[bytes]]] = {}
        self._copies = Speed()  # bytes from host memory to the device
        self._prefill = Speed()  # prompt tokens
        named = ["peer"] if hands_over or peer is not None else []
        self._counts = {name: TierCounts() for name in ("host", *(tier.name for tier in slow), *named)}

    @property
    def own_indexes(self) -> list[TierIndex]:
        """Of the tiers that only this server reads and writes."""
        return [self.host, *(tier.index for tier in self.slow if tier.questions is None)]

    # What a request's prefix finds.

    def prefetch(self, request: TierReader, num_cached: int, source: KVSource | None = None) -> Prefetch | None:
        """Begins to read what a slow tier has of a prefix, behind `num_cached` blocks that the device has;
        or what another server computed for it, at its `source`.

        None where nothing has to be waited for: the request may be scheduled at once.
        """
        if source is not None and self._peer is not None:
            return self._fetch(request, source, self._peer, num_cached)
        chain: list[tuple[bytes, SlowTier | None]] = []
        hashes = request.reusable_hashes(self._size)[num_cached:]
        hangs = any(tier.is_late for tier in self.slow)  # then a block that is being read may never come
        for key in hashes:
            is_in_host = self.host.lookup(key) if hangs else key in self.host
            tier = None if is_in_host else next((tier for tier in self.slow if tier.has(key)), None)
            if tier is None and not is_in_host:
                break
            chain.append((key, tier))
        shared = next((tier for tier in self.slow if tier.questions is not None and not tier.is_late), None)
        if shared is None or shared.questions is None or len(chain) == len(hashes):
            return self._begin(request, chain, Prefetch())
        prefetch = Prefetch(reads_left=1)
        self._questions[request.arrival_index] = request, prefetch, chain, hashes[len(chain) :]
        self.waits.begin(request.arrival_index, prefetch, LEAST_PATIENCE_NS)
        shared.num_asked += 1
        shared.questions.ask(request.arrival_index, hashes[len(chain) :])
        return prefetch

    def _fetch(self, request: TierReader, source: KVSource, peer: PeerTier, num_cached: int) -> Prefetch | None:
        """Reads what a prefill server computed for a request. There is no choice: it was computed to be read."""
        tier, keys = peer.books, request.reusable_hashes(self._size)
        most = len(keys) if source.transfer_id else len(source.slots)
        chain = [(key, None if key in self.host else tier) for key in keys[num_cached:most]]
        announced = [key for key, origin in chain if origin is tier]
        for key in announced:
            if tier.index.prepare_store(key) is not None:
                tier.index.complete_store(key, ok=True)
        prefetch = Prefetch(is_from_peer=True, is_strict=peer.is_strict, transfer_id=source.transfer_id)
        self.waits.begin(request.arrival_index, prefetch, PEER_PATIENCE_NS)
        self._read(chain, prefetch)
        for key in announced:
            tier.index.forget(key)  # a lease is read once
        peer.store.fetch(source, keys)
        return None if prefetch.is_done else prefetch

    def _begin(
        self, request: TierReader, chain: list[tuple[bytes, SlowTier | None]], prefetch: Prefetch
    ) -> Prefetch | None:
        """Reads a chain, if it has to be waited for and that is cheaper than to compute it."""
        if not any(tier is not None or not self.host.lookup(key) for key, tier in chain):
            return None
        choice = self._choice(chain)
        request.parts["tiers"] = choice.report()
        if not choice.loads:
            return None
        self.waits.begin(request.arrival_index, prefetch, max(LEAST_PATIENCE_NS, choice.recompute_ns or 0))
        self._read(chain, prefetch)
        return None if prefetch.is_done else prefetch

    def found(self, request: TierReader, num_cached: int) -> list[bytes]:
        """The blocks in host memory that continue the prefix of a request, if loading them pays."""
        keys = []
        for key in request.reusable_hashes(self._size)[num_cached:]:
            if not self.host.lookup(key):
                break
            keys.append(key)
        prefetch = self.waits.of(request.arrival_index)
        if not keys or (prefetch is not None and prefetch.reads):  # the choice was made before the reads
            return keys
        choice = self._choice([(key, None) for key in keys])
        report = request.parts.get("tiers")
        if report is None or (choice.loads and report.load_decision == "recompute"):  # that was of more blocks
            request.parts["tiers"] = choice.report(report or NOTHING_LOADED)
        return keys if choice.loads else []

    def load(self, request: TierReader, keys: Sequence[bytes], blocks: Sequence[int]) -> list[str]:
        """The next step copies `found` blocks to blocks of the device. Returns the tier that each came from."""
        tiers = []
        for key, block in zip(keys, blocks, strict=True):
            self._loads[block] = key, self.host.prepare_load(key)
            entry = self.host[key]
            tiers.append(entry.came_from or "host")
            entry.came_from = ""
        if tiers:
            report = request.parts.get("tiers")
            tokens = dict(report.loaded_tokens) if report is not None else {}
            for tier in tiers:
                tokens[tier] = tokens.get(tier, 0) + self._size
            request.parts["tiers"] = replace(report or NOTHING_LOADED, loaded_tokens=tokens)
        return tiers

    def release(self, request: TierReader) -> None:
        """The request was admitted or ended: nothing is held for it any more."""
        prefetch = self.waits.end(request.arrival_index)
        if prefetch is not None:
            self.holds.let_go(prefetch)

    # What is stored.

    def filled(self, key: bytes, block: int) -> None:
        """A block of the device is full and findable."""
        if self.stores_on == "fill" or key in self.holds.waiting:
            self._offer(key, block)

    def reused(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """An admitted request reads these cached blocks of the device."""
        for key, block in zip(keys, blocks, strict=True):
            self.host.touch(key)
            for tier in self.slow:
                tier.index.touch(key)
            if self.stores_on == "reuse" or key in self.holds.waiting:
                self._offer(key, block)

    def evicted(self, block: int, key: bytes) -> None:
        """The device gives a cached block up; its contents stay until the next launched step."""
        if block in self._loads:  # its request was preempted in the plan that admitted it
            self.host.complete_load(self._loads.pop(block)[0])
        elif self.stores_on == "evict":
            self._offer(key, block)

    def _offer(self, key: bytes, block: int) -> None:
        if key not in self.host and (key in self.holds.waiting or not any(key in tier.index for tier in self.slow)):
            self._offers[key] = block

    def is_coming(self, key: bytes) -> bool:
        """The block is in host memory, or on its way there."""
        return key in self._offers or key in self.host

    def lent(self, num_blocks: int, num_held: int, ended: Mapping[str, int] = MappingProxyType({})) -> None:
        """So many blocks more are there for other servers, and so many in all; how leases ended → how many."""
        counts = self._counts["peer"]
        counts.stored_bytes += self.block_bytes * num_blocks
        counts.blocks = num_held
        for end, number in ended.items():
            counts.leases_ended[end] = counts.leases_ended.get(end, 0) + number

    # What moves.

    @property
    def has_loads(self) -> bool:
        return bool(self._loads)

    @property
    def has_transfers(self) -> bool:
        return bool(self._offers or self._loads)

    def take_transfers(self) -> Transfers | None:
        """What the step copies that is launched now; None where nothing moves."""
        if not self.has_transfers:
            return None
        transfers = Transfers(
            loads=[(slot, block) for block, (_, slot) in self._loads.items()],
            loaded_keys=[key for key, _ in self._loads.values()],
        )
        for key, block in self._offers.items():
            slot = self.host.prepare_store(key)
            if slot is None:
                self._counts["host"].refused += 1
                self.holds.wake(key, ok=False)
            else:
                transfers.stores.append((block, slot))
                transfers.stored_keys.append(key)
        self.host.evicted.clear()
        self._offers, self._loads = {}, {}
        return transfers

    def transferred(self, transfers: Transfers, load_ns: int, store_ns: int) -> None:
        """A step that copied them was read."""
        counts, size = self._counts["host"], self.block_bytes
        counts.loaded_bytes += size * len(transfers.loads)
        counts.stored_bytes += size * len(transfers.stores)
        counts.load_ns += load_ns
        counts.store_ns += store_ns
        self._copies.observe(size * len(transfers.loads), load_ns)
        for key in transfers.loaded_keys:
            self.host.complete_load(key)
        for key in transfers.stored_keys:
            self.host.complete_store(key, ok=True)
            self.holds.wake(key, ok=True)
            for tier in self.slow:
                tier.backlog.append(key)
        for tier in self.slow:
            self._write_backlog(tier)

    def computed(self, prompt_tokens: int, device_ns: int) -> None:
        """A step computed so many prompt tokens in that time: how fast a prefix is computed again."""
        if prompt_tokens >= LEAST_TOKENS:
            self._prefill.observe(prompt_tokens, device_ns)

    def poll(self) -> None:
        """Takes in the reads and writes that ended."""
        for tier in self.slow:
            if tier.questions is not None:
                for answer in tier.questions.answers():
                    self._has_answer(tier, answer)
            for moved in tier.store.finished():
                if moved.is_read:
                    self._has_read(tier, moved)
                else:
                    self._has_written(tier, moved)
            self._write_backlog(tier)
        if self._peer is not None:
            for moved in self._peer.store.finished():
                self._has_read(self._peer.books, moved)
        self._give_up()

    def take_counts(self) -> dict[str, TierCounts]:
        """By tier, since the last call."""
        counts = self._counts
        self._counts = {name: TierCounts() for name in counts}
        counts["host"].blocks = len(self.host)
        for tier in self.slow:
            counts[tier.name].blocks = len(tier.index)
        if "peer" in counts:
            self._counts["peer"].blocks = counts["peer"].blocks
        return counts

    def close(self) -> None:
        """Finishes the writes, as long as CLOSE_S allows."""
        until_s = time.monotonic() + CLOSE_S
        for tier in self.slow:
            while (tier.num_writing or tier.backlog) and time.monotonic() < until_s:
                tier.store.wait()
                self.poll()
            tier.store.close()
        if self._peer is not None:
            self._peer.store.close()

    def _choice(self, chain: Sequence[tuple[bytes, SlowTier | None]]) -> Choice:
        """Times add up: reads of the slow tiers with what is queued there, and the copies to the device."""
        copy_ns = self._copies.ns(self.block_bytes * len(chain)) or 0
        load_ns: int | None = copy_ns
        for tier in self.slow:
            nbytes = sum(tier.store.block_bytes for _, each in chain if each is tier)
            read_ns = tier.reads.ns(nbytes + tier.reading_bytes) if nbytes else 0
            load_ns = None if load_ns is None or read_ns is None else load_ns + read_ns
        return choose(load_ns, self._prefill.ns(self._size * len(chain)))

    def _give_up(self) -> None:
        """Requests that waited for too long compute what was not read. What they waited for is left alone, until
        something ends there: a disk that hangs would hold up every one."""
        for prefetch in self.waits.take_late(self._heard_ns):
            for tier in self.slow if not prefetch.is_from_peer else ():
                tier.is_late |= tier.is_busy

    def _heard_ns(self, prefetch: Prefetch) -> int:
        """When the prefill server said that it still computes what the request waits for."""
        if self._peer is None or not prefetch.transfer_id:
            return 0
        return self._peer.store.heard_ns(prefetch.transfer_id)

    def _has_answer(self, tier: SlowTier, answer: Answer) -> None:
        tier.num_asked, tier.is_late = tier.num_asked - 1, False
        request, prefetch, chain, keys = self._questions.pop(answer.number)
        if not prefetch.is_cancelled and not prefetch.is_late:
            for key in keys[: answer.num_known]:
                if tier.index.prepare_store(key) is not None:
                    tier.index.complete_store(key, ok=True)
                chain.append((key, None if key in self.host else tier))
            self._begin(request, chain, prefetch)
        prefetch.reads_left -= 1
        prefetch.ready_ns = max(prefetch.ready_ns, answer.ended_ns)

    def _read(self, chain: Sequence[tuple[bytes, SlowTier | None]], prefetch: Prefetch) -> None:
        prefetch.reads = True
        for key, _ in chain:
            if self.host.lookup(key):
                self.holds.hold(prefetch, key)  # first of all: else the reads could evict it
        for key, tier in chain:
            if self.host.lookup(key):
                continue
            if key not in self.host:
                # While a shared store was asked, others may have evicted the block.
                is_there = tier is not None and tier.has(key)
                slot = self.host.prepare_store(key) if is_there else None
                if slot is None or tier is None:
                    break  # it is gone, or all slots are pinned: the rest is computed
                tier.index.prepare_load(key)
                tier.reading_bytes += tier.store.block_bytes
                tier.store.read(key, slot)
            self.holds.wait(prefetch, key)
        self.host.evicted.clear()

    def _has_read(self, tier: SlowTier, moved: Moved) -> None:
        counts, key = self._counts[tier.name], moved.key
        tier.reading_bytes -= tier.store.block_bytes
        tier.is_late = False
        tier.index.complete_load(key)
        self.host.complete_store(key, ok=moved.ok)
        counts.load_ns += moved.ended_ns - moved.began_ns
        if moved.ok:
            self.host[key].came_from = tier.name
            counts.loaded_bytes += moved.nbytes
            tier.reads.observe(moved.nbytes, moved.ended_ns - moved.began_ns)
        else:
            counts.failures += not moved.is_absent
            tier.index.forget(key)
            tier.store.remove(key)
        self.holds.wake(key, ok=moved.ok, read=moved)

    def _write_backlog(self, tier: SlowTier) -> None:
        most = max(1, int(WRITE_SHARE * self.host.capacity))
        while tier.backlog and tier.num_writing < most:
            key = tier.backlog.popleft()
            if key in tier.index:
                continue
            if not self.host.lookup(key) or tier.index.prepare_store(key) is None:  # evicted meanwhile; all are read
                self._counts[tier.name].refused += 1
                continue
            tier.remove_evicted()
            tier.num_writing += 1
            tier.store.write(key, self.host.prepare_load(key))

    def _has_written(self, tier: SlowTier, moved: Moved) -> None:
        counts = self._counts[tier.name]
        tier.num_writing -= 1
        self.host.complete_load(moved.key)
        tier.index.complete_store(moved.key, ok=moved.ok)
        counts.store_ns += moved.ended_ns - moved.began_ns
        if moved.ok:
            counts.stored_bytes += moved.nbytes
        else:
            counts.failures += 1
