"""The books of KV tiers: two phases, bounds, and the same tokens whatever the tiers do. No tensors."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sojourn.engine.messages import Abort
from sojourn.engine.techniques.tiers.cost import Speed, choose
from sojourn.engine.techniques.tiers.index import TierIndex
from sojourn.engine.techniques.tiers.slow_tier import SlowTier
from sojourn.engine.techniques.tiers.tiers import LEAST_PATIENCE_NS, KVTiers
from sojourn.engine.techniques.tiers.transfers import Transfers
from sojourn.metrics.ledger import Account
from sojourn.metrics.memory.kv_load import KVLoad
from sojourn.replay.simulated_runner import VirtualClock
from tests.engine.harness import submit
from tests.engine.memory.audits import audit_tiers
from tests.engine.simulated import TICK_NS, SimulatedQuestions, SimulatedStore, Simulation, sequential
from tests.engine.traffic import copied_and_loaded, given_up_for_loads

KEYS = [bytes([number]) for number in range(8)]


class TierBooks(RuleBasedStateMachine):
    """Stores and loads in any order, beside a model of what is written where."""

    def __init__(self):
        super().__init__()
        self.index = TierIndex("host", 3)
        self.contents: dict[int, bytes | None] = {}  # slot → whose bytes it holds, None: half-written
        self.writing: set[bytes] = set()
        self.loading: list[tuple[bytes, int]] = []

    @rule(key=st.sampled_from(KEYS))
    def begin_store(self, key):
        known = key in self.index
        slot = self.index.prepare_store(key)
        if known:
            assert slot is None
        if slot is not None:
            assert slot not in [used for _, used in self.loading], "a slot that is read is given away"
            assert slot not in [self.index[other].slot for other in self.writing]
            self.contents[slot] = None
            self.writing.add(key)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), ok=st.booleans())
    def end_store(self, data, ok):
        key = data.draw(st.sampled_from(sorted(self.writing)))
        if ok:
            self.contents[self.index[key].slot] = key
        self.writing.remove(key)
        self.index.complete_store(key, ok=ok)
        assert self.index.lookup(key) == ok

    @rule(key=st.sampled_from(KEYS))
    def begin_load(self, key):
        if self.index.lookup(key):
            slot = self.index.prepare_load(key)
            assert self.contents[slot] == key, "a half-written block, or another one, is read"
            self.loading.append((key, slot))

    @precondition(lambda self: self.loading)
    @rule(data=st.data())
    def end_load(self, data):
        key, slot = self.loading.pop(data.draw(st.integers(0, len(self.loading) - 1)))
        assert self.contents[slot] == key, "it changed while it was read"
        self.index.complete_load(key)

    @rule(key=st.sampled_from(KEYS))
    def touch(self, key):
        self.index.touch(key)

    @rule(key=st.sampled_from(KEYS))
    def forget(self, key):
        self.index.forget(key)
        assert not self.index.lookup(key)

    @invariant()
    def slots_close(self):
        blocks = self.index._blocks.values()
        assert sorted([block.slot for block in blocks] + self.index._free) == [0, 1, 2]
        assert all(key in self.index for key, _ in self.loading)


TestTierBooks = TierBooks.TestCase
TestTierBooks.settings = settings(max_examples=60, stateful_step_count=30)


def test_a_tier_evicts_the_least_recently_used_block_and_never_more_than_it_must():
    index = TierIndex("host", 2)
    for key in KEYS[:2]:
        index.prepare_store(key)
        index.complete_store(key, ok=True)
    assert index.evicted == [], "at its capacity nothing goes"
    index.touch(KEYS[0])
    assert index.prepare_store(KEYS[2]) is not None
    assert index.evicted == [KEYS[1]]
    index.prepare_load(KEYS[0])
    assert index.prepare_store(KEYS[3]) is None, "one is read, one is being written"


def test_the_cheaper_of_loading_and_computing_again_is_chosen():
    assert choose(10, 20).loads and not choose(20, 10).loads
    assert choose(None, 10).loads, "what was never tried is tried"
    speed = Speed()
    speed.observe(100, 50)
    assert speed.ns(1000) == 500
    speed.observe(0, 10)
    assert speed.ns(1000) == 500, "nothing was moved: nothing is learnt"


@dataclass
class Waiting:
    """A request as the tiers see it, whose prefix has these keys."""

    keys: list[bytes]
    arrival_index: int = 1
    parts: dict[str, KVLoad] = field(default_factory=dict)

    def reusable_hashes(self, block_size: int) -> list[bytes]:
        return self.keys


@dataclass
class Books:
    """Tiers without a device, the store of the slow one, and the clock."""

    tiers: KVTiers
    store: SimulatedStore
    clock: VirtualClock

    def run(self) -> None:
        """Until nothing is left to read or to answer."""
        for _ in range(6):
            self.tiers.poll()
            self.store.work(1)
        self.tiers.poll()


def play(seed: int, **tiers) -> Simulation:
    """Conversations and one-shot prompts that are more than the pool holds, with aborts, forks and preemptions."""
    generator, disk_generator = random.Random(seed), random.Random(seed)
    simulation = Simulation(num_blocks=14, max_num_seqs=4, overlap=generator.random() < 0.5, **tiers)
    prompts, pasts = {}, [[1, 2, 3, 4, 5, 6, 7, 8]]
    for number in range(30):
        prompt = [*generator.choice(pasts), *(generator.randrange(9) for _ in range(generator.randrange(1, 9)))][:36]
        name = f"r{number}"
        prompts[name] = prompt
        pasts.append(prompt)
        simulation.receive(submit(name, prompt, max_tokens=generator.randrange(1, 9)))
        if generator.random() < 0.15:
            prompts.pop(name)
            simulation.receive(Abort(name))
        for _ in range(generator.randrange(5)):
            if simulation.disk is not None:
                simulation.disk.work(disk_generator.randrange(3))
            if simulation.engine.has_work:
                simulation.step()
    simulation.drain()
    simulation.check_idle()
    for name, prompt in prompts.items():
        tokens = simulation.published.tokens[name]
        assert tokens == sequential(prompt, len(tokens)), "a tier changed the tokens"
        ended = simulation.published.ended[name]
        assert sum(ended.prefix.prefix_outcomes.values()) == len(prompt)
        loaded = sum(count for outcome, count in ended.prefix.prefix_outcomes.items() if outcome.startswith("hit_"))
        if not ended.preemptions:
            assert loaded == sum(ended.kv_load.loaded_tokens.values() if ended.kv_load else ())
    if simulation.tiers is not None:
        audit_tiers(simulation.tiers)
        assert not simulation.tiers.waits and not simulation.tiers.holds.waiting, "nobody waits"
    return simulation


@pytest.mark.parametrize("stores", ["fill", "reuse", "evict"])
@pytest.mark.parametrize("seed", range(2))
def test_tokens_stay_the_same_with_tiers_of_any_size(seed, stores):
    plain = play(seed)
    for host_blocks, disk_blocks in ((1, 0), (3, 2), (8, 40)):
        tiered = play(seed, host_blocks=host_blocks, disk_blocks=disk_blocks, stores=stores)
        assert tiered.published.tokens == plain.published.tokens


def test_a_block_that_a_step_copies_and_gives_up_may_be_loaded_into_by_the_same_step():
    simulation = Simulation(num_blocks=6, max_num_seqs=2, host_blocks=40)
    plans, launch = [], simulation.runner.launch
    simulation.runner.launch = lambda plan: plans.append(plan) or launch(plan)
    prompts = copied_and_loaded(simulation.scheduler.pool.block_size)
    for messages in prompts:
        simulation.receive(*messages)
        simulation.drain()
    assert any(given_up_for_loads(plan) for plan in plans), "the case did not come up"
    for message in (message for messages in prompts for message in messages):
        length = message.sampling.max_tokens
        assert simulation.published.tokens[message.request_id] == sequential(message.prompt_token_ids, length)
    audit_tiers(simulation.tiers)


def test_a_block_that_is_evicted_before_its_load_was_launched_is_not_loaded():
    """Its request was preempted in the plan that admitted it, and what owns the block now may be a copy's target."""
    simulation = Simulation(host_blocks=4)
    tiers, request = simulation.tiers, Waiting(KEYS[:2])
    for key in KEYS[:2]:
        tiers.host.prepare_store(key)
        tiers.host.complete_store(key, ok=True)
    tiers.load(request, KEYS[:2], [7, 8])
    tiers.evicted(8, KEYS[1])
    transfers = tiers.take_transfers()
    assert [block for _, block in transfers.loads] == [7] and transfers.loaded_keys == KEYS[:1]
    assert not tiers.host[KEYS[1]].pins
    tiers.transferred(transfers, 1, 1)
    audit_tiers(tiers)
    assert not any(block.pins for block in tiers.host._blocks.values())


def make_books(*in_host: bytes, slots: int, stored: Sequence[bytes], asks: bool = False) -> Books:
    """Tiers without a device. The slow store has the blocks `stored`, and is asked for them if `asks`."""
    clock = VirtualClock(TICK_NS)
    store = SimulatedStore({}, {key: [key] for key in stored})
    questions = SimulatedQuestions(store) if asks else None
    host, slow = TierIndex("host", slots), SlowTier(store, 8, questions)
    for key in in_host:
        host.prepare_store(key)
        host.complete_store(key, ok=True)
    if asks:
        slow.index = TierIndex("remote", 8)  # nothing is known before it asked
    return Books(KVTiers(host, [slow], block_size=4, block_bytes=100, store_policy="fill", clock=clock), store, clock)


@pytest.mark.parametrize("asks", [False, True], ids=["disk", "remote"])
def test_reads_of_a_prefix_evict_none_of_its_own_blocks(asks):
    """The blocks 2 and 3 are the oldest in host memory when a slot is taken for block 1."""
    first, second, third, other = KEYS[:4]
    books = make_books(second, third, other, slots=3, stored=KEYS[:3] if asks else [first], asks=asks)
    request = Waiting([first, second, third])
    prefetch = books.tiers.prefetch(request, 0)
    books.run()
    assert prefetch.is_done and not prefetch.is_late
    assert books.tiers.found(request, 0) == request.keys and other not in books.tiers.host
    books.tiers.release(request)
    audit_tiers(books.tiers)


def test_a_chain_ends_at_a_block_that_was_evicted_while_the_remote_tier_was_asked():
    first, second, *others = KEYS[:5]
    books = make_books(first, slots=2, stored=[second], asks=True)
    request = Waiting([first, second])
    prefetch = books.tiers.prefetch(request, 0)
    for key in others[:2]:
        books.tiers.host.prepare_store(key)
        books.tiers.host.complete_store(key, ok=True)
    assert first not in books.tiers.host
    books.run()
    assert prefetch.is_done and not books.tiers.found(request, 0)
    books.tiers.release(request)
    audit_tiers(books.tiers)


@pytest.mark.parametrize("asks", [False, True], ids=["disk", "remote"])
def test_a_tier_that_hangs_is_waited_for_once_and_then_left_alone_until_something_ends(asks):
    books = make_books(slots=4, stored=KEYS[:2], asks=asks)
    request = Waiting(KEYS[:2])
    prefetch = books.tiers.prefetch(request, 0)
    books.tiers.poll()
    books.tiers.poll()
    assert not prefetch.is_done
    books.clock.now_ns += LEAST_PATIENCE_NS
    books.tiers.poll()
    assert prefetch.is_done and books.tiers.prefetch(Waiting(KEYS[:2], arrival_index=2), 0) is None
    assert not books.tiers.found(request, 0)
    books.run()
    assert books.tiers.found(request, 0) == KEYS[:2], "what came in the end is used"
    books.tiers.release(request)
    books.tiers.host.forget(KEYS[0])
    assert books.tiers.prefetch(Waiting(KEYS[:2], arrival_index=3), 0) is not None
    audit_tiers(books.tiers)


def test_a_long_prefix_is_waited_for_as_long_as_it_takes_to_compute():
    books = make_books(slots=4, stored=KEYS[:2])
    books.tiers.computed(1000, 1000 * LEAST_PATIENCE_NS)
    prefetch = books.tiers.prefetch(Waiting(KEYS[:2]), 0)
    for _ in range(7):
        books.clock.now_ns += LEAST_PATIENCE_NS
        books.tiers.poll()
        assert not prefetch.is_done
    books.clock.now_ns += LEAST_PATIENCE_NS
    books.tiers.poll()
    assert prefetch.is_done


@pytest.mark.parametrize("asks", [False, True], ids=["disk", "remote"])
@pytest.mark.parametrize("copies_pay", [False, True])
def test_the_record_says_of_a_prefix_in_two_tiers_what_was_done(asks, copies_pay):
    """The slow tier is not worth waiting for. Whether the part in host memory is loaded is another question."""
    books = make_books(KEYS[0], slots=4, stored=KEYS[1:3], asks=asks)
    tiers, request = books.tiers, Waiting(KEYS[:3])
    tiers.slow[0].reads.observe(1, 10**9)
    tiers.computed(1000, 10**9)
    if not copies_pay:
        tiers.transferred(Transfers(loads=[(0, 0)]), 10**9, 0)
    tiers.prefetch(request, 0)
    books.run()
    assert request.parts["tiers"].load_decision == "recompute"
    assert tiers.found(request, 0) == KEYS[:copies_pay]
    report = request.parts["tiers"]
    assert report.load_decision == ("load" if copies_pay else "recompute")
    assert copies_pay == (report.load_predicted_ns <= report.recompute_predicted_ns)
    tiers.release(request)
    audit_tiers(tiers)


def test_tiers_save_prompt_work_and_say_so():
    computed, hits = {}, 0
    for host_blocks in (0, 64):
        simulation = play(3, host_blocks=host_blocks)
        computed[host_blocks] = sum(ended.computed_tokens for ended in simulation.published.ended.values())
        for ended in simulation.published.ended.values():
            hits += ended.prefix.prefix_outcomes.get("hit_host", 0) if ended.prefix else 0
    assert hits > 0 and computed[64] < computed[0]


def restarted() -> tuple[Simulation, list[int]]:
    """A simulation whose disk has the five blocks of a prompt, which another one computed."""
    files: dict = {}
    prompt = list(range(20))
    before = Simulation(host_blocks=8, disk_blocks=8, files=files)
    before.receive(submit("a", prompt, max_tokens=2))
    before.drain()
    before.engine.close()
    assert len(files) == 5
    return Simulation(host_blocks=8, disk_blocks=8, files=files), prompt


def test_a_prefix_on_disk_outlives_the_process_and_is_read_while_its_request_waits():
    after, prompt = restarted()
    after.receive(submit("b", [*prompt, 3], max_tokens=2))
    assert after.engine.is_preparing and not after.engine.has_work, "it waits outside the queue"
    after.drain()
    ended = after.published.ended["b"]
    assert ended.kv_load.loaded_tokens == {"disk": 20} and ended.kv_load.load_decision == "load"
    assert ended.prefix.prefix_outcomes == {"hit_disk": 20, "miss_cold": 1}
    assert ended.cached_tokens == 20 and ended.ledger[Account.MEMORY_LOAD] > 0
    assert after.published.tokens["b"] == sequential([*prompt, 3], 2)


def test_blocks_that_cannot_be_read_are_computed_and_counted():
    after, prompt = restarted()
    after.disk.broken.add(after.disk.known()[2])
    after.receive(submit("b", [*prompt, 3], max_tokens=2))
    after.drain()
    ended = after.published.ended["b"]
    assert ended.kv_load.loaded_tokens == {"disk": 8}, "what stands before the damage is used"
    assert after.published.tokens["b"] == sequential([*prompt, 3], 2)
    assert sum(record.tier_failures.get("disk", 0) for record in after.published.records) >= 1


def test_computing_again_is_chosen_where_the_disk_is_slow():
    after, prompt = restarted()
    after.tiers.slow[0].reads.observe(1, 10**9)
    after.tiers.computed(1000, 10**6)
    after.receive(submit("b", [*prompt, 3], max_tokens=2))
    assert not after.engine.is_preparing
    after.drain()
    load = after.published.ended["b"].kv_load
    assert load.load_decision == "recompute" and load.load_predicted_ns > load.recompute_predicted_ns
    assert not load.loaded_tokens


def test_a_request_that_leaves_while_its_prefix_is_read_leaves_nothing_behind():
    after, prompt = restarted()
    after.receive(submit("b", [*prompt, 3], max_tokens=2))
    after.disk.work(2)
    after.receive(Abort("b"))
    after.disk.work(10)
    after.receive()
    after.drain()
    audit_tiers(after.tiers)
    assert all(not block.pins for block in after.tiers.host._blocks.values())
    assert after.published.ended["b"].reason == "abort"


@pytest.mark.parametrize("seed", range(4))
def test_ledgers_close_with_tiers(seed):
    """From arrival to the last token every nanosecond is booked, loads and stores among them."""
    simulation = play(seed, host_blocks=8, disk_blocks=40)
    for name, ended in simulation.published.ended.items():
        booked = sum(ended.ledger)
        assert abs(booked - (ended.booked_ns - simulation.submitted_ns[name])) <= 100_000, name
    loads = sum(record.load_ns for record in simulation.published.records)
    stores = sum(record.store_ns for record in simulation.published.records)
    assert stores > 0
    assert loads == sum(record.tier_load_ns.get("host", 0) for record in simulation.published.records)
