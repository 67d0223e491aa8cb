"""Leases and reads in any order: tokens are those of one server, and neither side keeps a block. No tensors."""

import random
from collections import deque

import pytest
from msgspec.structs import replace

from sojourn.engine.kv_source import KVSource
from sojourn.engine.memory.prefix import chain_hash
from sojourn.engine.messages import Abort, Submit
from sojourn.engine.techniques.handover.headers import HEADER, HEADER_BYTES, SlotHeaders, is_of
from sojourn.engine.techniques.tiers.slow_tier import PeerTier
from sojourn.engine.techniques.tiers.store import Moved
from sojourn.replay.simulated_runner import VirtualClock
from tests.engine.harness import submit
from tests.engine.memory.audits import audit_tiers
from tests.engine.simulated import TICK_NS, Simulation, sequential

LEASE_NS = 40_000_000
MODEL = b"model".ljust(16, b"\0")  # as the simulation's headers have it


class SimulatedPeers:
    """Reads a prefill simulation in three parts, whenever the test says so: header, block, header."""

    name, block_bytes = "peer", 100

    def __init__(self, prefill: Simulation, own_host: dict):
        self.prefill, self.own_host = prefill, own_host
        self.is_dead = False
        self._follows: dict[str, list[list]] = {}  # transfer → key, block of the prompt and our slot of what is to come
        self.num_early = 0  # blocks that were read before their prompt was computed
        self._named: list[tuple[bytes, int]] = []
        self._parts: deque = deque()
        self._read: dict[bytes, tuple[bytes, object]] = {}
        self._moved: list[Moved] = []

    def known(self):
        return []

    def read(self, key: bytes, slot: int) -> None:
        self._named.append((key, slot))

    def fetch(self, source: KVSource, keys) -> None:
        places = dict(zip(keys, range(len(keys)) if source.transfer_id else source.slots, strict=False))
        reads, self._named = [[key, places[key], slot] for key, slot in self._named], []
        if source.transfer_id:
            self._follows[source.transfer_id] = reads
        else:
            self._queue(reads)
            self._parts.append(("release", source.lease_id, 0, 0))

    def heard_ns(self, transfer_id: str) -> int:
        return self.prefill.clock.now_ns if self.prefill.announcements.since(transfer_id, 0) is not None else 0

    def _queue(self, reads: list[list]) -> None:
        self._parts += [(part, *read) for read in reads for part in ("before", "block", "after")]

    def follow(self) -> None:
        """What a peer's thread does when the side channel has news; a call that never reaches the prefill server, or a
        server that is dead, ends its transfer."""
        for transfer_id, reads in list(self._follows.items()):
            found = self.prefill.announcements.since(transfer_id, 0)
            if self.is_dead or found is None or found.error:
                self._moved += [Moved(key, True, False, 100, 1, 2, "it is gone") for key, _, _ in reads]
                del self._follows[transfer_id]
                continue
            ready = [[key, found.slots[place], slot] for key, place, slot in reads if place < len(found.slots)]
            self._queue(ready)
            self.num_early += 0 if found.is_over else len(ready)
            reads[:] = [read for read in reads if read[1] >= len(found.slots)]
            if found.is_over:
                self._moved += [Moved(key, True, False, 100, 1, 2, is_absent=True) for key, _, _ in reads]
                self._parts.append(("release", found.lease_id, 0, 0))
                del self._follows[transfer_id]

    def remove(self, key: bytes) -> None:
        """It is the peer's."""

    def finished(self):
        moved, self._moved = self._moved, []
        return moved

    def close(self) -> None:
        """Nothing is open."""

    def work(self, count: int) -> None:
        """The next parts of reads, at whatever moment this is for the prefill server."""
        self.follow()
        for _ in range(min(count, len(self._parts))):
            part, key, theirs, ours = self._parts.popleft()
            if part == "release":
                if not self.is_dead:
                    self.prefill.leases.release(key)
            elif part == "before":
                self._read[key] = self._header(theirs), None
            elif part == "block":
                self._read[key] = self._read[key][0], list(self.prefill.model.host.get(theirs, ["nothing"]))
            else:
                before, block = self._read.pop(key)
                ok = not self.is_dead and before == self._header(theirs) and is_of(before, MODEL, key)
                self.own_host[ours] = block if ok else ["damaged"]
                self._moved.append(Moved(key, True, ok, 100, 1, 2, "" if ok else "it is gone"))

    def _header(self, slot: int) -> bytes:
        return bytes(self.prefill.headers._memory[slot * HEADER_BYTES :][: HEADER.size])


class Pair:
    """A prefill and a decode simulation with one clock, and the proxy between them."""

    def __init__(self, seed: int, *, is_strict: bool = False, by_chunk: bool = True, chunk: int = 32, **decode):
        self.dice = random.Random(seed)
        clock = VirtualClock(TICK_NS)
        common = {"clock": clock, "stores": None}
        self.prefill = Simulation(
            num_blocks=16,
            host_blocks=8,
            lease_ns=LEASE_NS,
            by_chunk=by_chunk,
            max_num_batched_tokens=8,
            overlap=decode.get("overlap", False),
            **common,
        )
        self.peers: SimulatedPeers | None = None

        def peer(host: dict) -> PeerTier:
            self.peers = SimulatedPeers(self.prefill, host)
            return PeerTier(self.peers, is_strict=is_strict)

        self.decode = Simulation(**{"num_blocks": 14, "host_blocks": 6} | common | decode, peer=peer)
        self.requests: dict[str, Submit] = {}
        self.proxied: set[str] = set()  # the proxy has the prefill server's answer

    def arrive(self, request: Submit) -> None:
        self.requests[request.request_id] = request
        self.prefill.receive(replace(request, hands_over=True, sampling=replace(request.sampling, max_tokens=1)))

    def arrive_at_once(self, request: Submit) -> None:
        """As a proxy that sends both calls with one transfer id; either may be the first."""
        self.requests[request.request_id] = request
        self.proxied.add(request.request_id)
        one, name = replace(request.sampling, max_tokens=1), f"xfer-{request.request_id}"
        source = KVSource("prefill", "127.0.0.1", 1, transfer_id=name)
        calls = [
            lambda: self.prefill.receive(replace(request, hands_over=True, transfer_id=name, sampling=one)),
            lambda: self.decode.receive(replace(request, kv_source=source)),
        ]
        self.dice.shuffle(calls)
        for call in calls:
            call()

    def proxy(self) -> None:
        """Hands on what the prefill server has answered since; now and then the proxy forgets one."""
        for name, ended in list(self.prefill.published.ended.items()):
            if name not in self.proxied:
                self.proxied.add(name)
                if ended.reason == "length":
                    self.check_source(self.requests[name], ended.kv_source)
                if ended.reason == "length" and self.dice.random() < 0.9:
                    self.decode.receive(replace(self.requests[name], kv_source=ended.kv_source))

    def check_source(self, request: Submit, source: KVSource) -> None:
        """While the lease lasts its slots hold the prompt's blocks, from the first on."""
        if source.lease_id in self.prefill.leases._leases:
            parent = b""
            for number, slot in enumerate(source.slots):
                parent = chain_hash(parent, request.prompt_token_ids[4 * number : 4 * number + 4])
                assert is_of(self.peers._header(slot), MODEL, parent), "it names another block"

    def abort(self, simulation: Simulation) -> None:
        live = list(simulation.scheduler.requests)
        if live:
            simulation.receive(Abort(self.dice.choice(live)))

    def turn(self, simulation: Simulation) -> None:
        if simulation.engine.has_work:
            simulation.step()
        else:
            simulation.engine.flush()
            simulation.receive()

    def drain_prefill(self) -> None:
        while self.prefill.engine.has_work or self.prefill.engine.is_preparing:
            self.turn(self.prefill)
        self.prefill.engine.flush()
        self.proxy()

    def drain(self) -> None:
        while any(each.engine.has_work or each.engine.is_preparing for each in (self.prefill, self.decode)):
            self.prefill.clock.now_ns += 100_000
            self.turn(self.prefill)
            self.proxy()
            self.turn(self.decode)
            self.peers.work(5)
        self.peers.work(10**6)

    def check_idle(self) -> None:
        """Nothing is held, on either side, once the last lease is over."""
        self.prefill.clock.now_ns += 2 * LEASE_NS
        for simulation in (self.prefill, self.decode):
            simulation.engine.flush()
            simulation.check_idle()
            tiers = simulation.tiers
            audit_tiers(tiers)
            assert not tiers.holds.waiting and not tiers.waits
            assert not any(block.pins for block in tiers.host._blocks.values()), "a slot is pinned for nobody"
        assert not len(self.prefill.leases) and not self.prefill.headers.num_sealed
        announced = self.prefill.announcements._transfers.values()
        assert all(each.is_over and not each.slots for each in announced), "a transfer is announced for ever"
        assert not any(self.prefill.headers._memory), "a header outlives its lease"
        assert not self.decode.tiers._peer.books.index._blocks, "what a peer has is still announced"


def prompts(dice: random.Random, count: int) -> list[list[int]]:
    stems = [[dice.randrange(50) for _ in range(dice.randint(4, 20))] for _ in range(3)]
    return [dice.choice(stems) + [dice.randrange(50) for _ in range(dice.randint(1, 9))] for _ in range(count)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("at_once", [0.0, 0.6])
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_leases_reads_aborts_and_a_death_gives_the_tokens_of_one_server(seed, at_once, overlap):
    pair = Pair(seed, overlap=overlap, by_chunk=seed != 1, chunk=8 if at_once else 32)
    dice = pair.dice
    pair.prefill.runner.stores_beside_steps = seed != 0
    for number, prompt in enumerate(prompts(dice, 40)):
        arrive = pair.arrive_at_once if at_once and dice.random() < at_once else pair.arrive
        arrive(submit(f"r{number}", prompt, max_tokens=dice.randint(1, 6)))
        for _ in range(dice.randint(0, 6)):
            event = dice.random()
            if event < 0.35:
                pair.turn(pair.prefill)
            elif event < 0.6:
                pair.turn(pair.decode)
            elif event < 0.8:
                pair.peers.work(dice.randint(1, 7))
            elif event < 0.9:
                pair.proxy()
            elif event < 0.95:
                pair.prefill.clock.now_ns += LEASE_NS
                for _ in range(dice.randint(0, 3)):  # others may get the slots while they are being read
                    pair.turn(pair.prefill)
            else:
                pair.abort(dice.choice((pair.prefill, pair.decode)))
        if number == 30:
            pair.peers.is_dead = seed == 2
    pair.drain()
    pair.check_idle()
    finished = {name: tokens for name, tokens in pair.decode.published.tokens.items()
                if pair.decode.published.ended[name].reason == "length"}  # fmt: skip
    assert len(finished) > 15
    for name, tokens in finished.items():
        request = pair.requests[name]
        assert tokens == sequential(request.prompt_token_ids, request.sampling.max_tokens)
    loads = [ended.kv_load for ended in pair.decode.published.ended.values() if ended.kv_load is not None]
    assert sum(load.loaded_tokens.get("peer", 0) for load in loads) > 0
    assert (pair.peers.num_early > 0) == (at_once > 0 and seed != 1), "read early only by chunk"


def test_a_block_that_another_prompt_takes_while_it_is_read_is_not_used():
    pair = Pair(0)
    late, others = list(range(17)), [[number] * 17 for number in range(20, 23)]
    pair.arrive(submit("late", late, 4))
    pair.proxied.add("late")
    pair.drain_prefill()
    (ended,) = pair.prefill.published.ended.values()
    pair.decode.receive(replace(pair.requests["late"], kv_source=ended.kv_source))
    pair.peers.work(1)  # it saw a header
    pair.prefill.clock.now_ns += 2 * LEASE_NS
    for number, prompt in enumerate(others):
        pair.arrive(submit(f"r{number}", prompt, 4))
        pair.drain_prefill()
    pair.drain()
    pair.check_idle()
    assert pair.decode.published.tokens["late"] == sequential(late, 4)
    assert not pair.decode.published.ended["late"].kv_load.loaded_tokens


@pytest.mark.parametrize("is_heard", [True, False])
def test_a_request_waits_as_long_as_its_prefill_server_says_that_it_computes(is_heard):
    pair, prompt = Pair(0, chunk=8), list(range(21))
    if not is_heard:
        pair.peers.heard_ns = lambda transfer_id: 0
    pair.arrive_at_once(submit("late", prompt, 4))
    for _ in range(3):
        pair.turn(pair.decode)
        pair.prefill.clock.now_ns += 8_000_000_000  # a request waits 10 s for what nobody computes
    pair.turn(pair.decode)
    pair.drain()
    pair.check_idle()
    assert pair.decode.published.tokens["late"] == sequential(prompt, 4)
    load = pair.decode.published.ended["late"].kv_load
    assert (load is not None and load.loaded_tokens == {"peer": 20}) == is_heard


def test_a_slot_that_is_sealed_again_has_another_header():
    memory = memoryview(bytearray(2 * HEADER_BYTES))
    headers, seen = SlotHeaders(memory, MODEL), set()
    for _ in range(3):
        headers.seal(1, b"key".ljust(16, b"\0"))
        headers.seal(1, b"key".ljust(16, b"\0"))  # of a second lease
        seen.add(bytes(memory))
        headers.unseal(1)
        assert bytes(memory) in seen, "one lease still holds it"
        headers.unseal(1)
        assert not any(memory)
    assert len(seen) == 3


def test_a_failed_read_ends_a_request_where_the_settings_say_so():
    pair = Pair(0, is_strict=True)
    pair.peers.is_dead = True
    pair.arrive(submit("r", list(range(17)), 4))
    pair.dice.random = lambda: 0.0  # the proxy forgets nothing
    pair.drain_prefill()
    pair.drain()
    pair.check_idle()
    ended = pair.decode.published.ended["r"]
    assert ended.reason == "error" and ended.error == "it is gone" and ended.is_peer_error
