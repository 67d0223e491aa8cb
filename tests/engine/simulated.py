"""An engine on a virtual clock over a device whose cache remembers which token each slot was written for."""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from sojourn.engine.config import EngineConfig
from sojourn.engine.kv_event_wire import WireFormat
from sojourn.engine.kv_source import KVAddress
from sojourn.engine.loop.engine import Engine
from sojourn.engine.loop.scheduling import make_block_observer
from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.eviction import make_eviction_policy
from sojourn.engine.memory.kv_events import make_kv_event_log
from sojourn.engine.memory.shadow.observer import ShadowObserver
from sojourn.engine.memory.window import FreedWindow
from sojourn.engine.messages import Observed, Submit, Tokens
from sojourn.engine.request.plan import ScheduledTokens, StepPlan
from sojourn.engine.request.policies import make_policy
from sojourn.engine.request.request import Request, State
from sojourn.engine.request.scheduler import Scheduler
from sojourn.engine.techniques.handover.announcements import Announcements
from sojourn.engine.techniques.handover.handoffs import Handoffs
from sojourn.engine.techniques.handover.headers import HEADER_BYTES, SlotHeaders
from sojourn.engine.techniques.handover.lease import LeaseTable
from sojourn.engine.techniques.planning import planning
from sojourn.engine.techniques.speculation.draft_lengths import DraftLengths
from sojourn.engine.techniques.speculation.planning import DraftPlanning
from sojourn.engine.techniques.tiers.index import TierIndex
from sojourn.engine.techniques.tiers.slow_tier import PeerTier, SlowTier
from sojourn.engine.techniques.tiers.store import Answer, Moved
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.engine.techniques.tiers.transfers import Transfers
from sojourn.engine.telemetry.observer import make_observer
from sojourn.metrics.compute.cost_model import ModelShape
from sojourn.metrics.records import StepRecord
from sojourn.replay.simulated_runner import Computed, SimulatedRunner, TurnTimes, VirtualClock
from tests.engine.memory.audits import audit_observer, audit_pool, audit_tiers
from tests.engine.published import Published

SHAPE = ModelShape(
    vocab_size=50, hidden_size=8, attention_parameters=384, mlp_parameters=768, pair_flops=32, windows=((None, 2),),
    kv_bytes_per_token=64, weight_bytes=4096,
)  # fmt: skip


TICK_NS = 1000  # so that forgotten time would show


def next_token(token_ids: list[int]) -> int:
    """The simulated model: a token that depends on everything before it."""
    return int.from_bytes(hashlib.blake2b(repr(token_ids).encode(), digest_size=4).digest()) % SHAPE.vocab_size


def sequential(prompt: list[int], max_tokens: int) -> list[int]:
    """What the simulated model says to one request alone, without any engine."""
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


@dataclass(slots=True)
class SimulatedPreparation:
    """Done at a moment of the virtual clock."""

    clock: VirtualClock
    ready_ns: int
    error: str | None = None
    waits_for: str = "grammar"

    @property
    def adapter_ready_ns(self) -> int | None:
        return self.ready_ns if self.waits_for == "adapter" else None

    @property
    def is_done(self) -> bool:
        return self.clock.now_ns >= self.ready_ns


@dataclass
class KnownSteps:
    """The times of steps: the device's alone. What the host takes are readings of the clock."""

    step_ns: int = 1_000_000
    token_ns: int = 50_000
    idle_receive_ns: int = 0
    stalls: dict[int, int] = field(default_factory=dict)  # number of a step → for how long the device stands still
    planned: int = 0

    def times(self, plan: StepPlan, begin_ns: float) -> TurnTimes:
        stall_ns, self.planned = self.stalls.get(self.planned, 0), self.planned + 1
        work_ns = self.step_ns + self.token_ns * sum(item.new_tokens for item in plan.scheduled)
        return TurnTimes(0, work_ns + stall_ns, 0, 0, 0)


@dataclass
class CheckedModel:
    """Its KV cache remembers which token each slot was written for: whatever a request reads is what was written for
    it."""

    pool: BlockPool
    draft_ns: int = 70_000
    writes_ahead: bool = False
    draft_quality: float = 0.7  # share of the drafts that are right
    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def __post_init__(self) -> None:
        self.block_size = self.pool.block_size
        self.slots: dict[int, tuple[int, ...]] = {}  # slot → the tokens up to and with the one it holds
        self.host: dict[int, list[tuple[int, ...] | None]] = {}  # slot of host memory → what a block held
        self.drawn: dict[int, int] = {}  # order of a request → what the device drew for it last
        self.num_unread = 0  # steps
        self.preparations: dict[str, SimulatedPreparation] = {}  # of requests that may not be scheduled at once

    def begin(self, request: Request) -> SimulatedPreparation | None:
        return self.preparations.get(request.id)

    def compute(self, plan: StepPlan) -> Computed:
        transfers = plan.parts.get("tiers")
        store_ns = self._store(transfers) if transfers is not None else 0
        size, targets = self.block_size, [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets), "two blocks are copied to one"
        copied = {
            target * size + i: self.slots.get(source * size + i) for source, target in plan.copies for i in range(size)
        }
        self.slots |= copied  # all are read before any is written
        load_ns = self._load(transfers) if transfers is not None else 0
        sampled = {item.request.id: tokens for item in plan.scheduled if (tokens := self.tokens(item))}
        self.num_unread += 1
        return Computed(sampled, load_ns, store_ns)

    def transfer(self, transfers: Transfers) -> tuple[int, int]:
        store_ns = self._store(transfers)
        return self._load(transfers), store_ns

    def _store(self, transfers: Transfers) -> int:
        size = self.block_size
        for block, slot in transfers.stores:
            self.host[slot] = [self.slots.get(block * size + i) for i in range(size)]
        return len(transfers.stores) * 10_000

    def _load(self, transfers: Transfers) -> int:
        for slot, block in transfers.loads:
            for i, history in enumerate(self.host[slot]):
                self.slots[block * self.block_size + i] = history
        return len(transfers.loads) * 20_000

    def tokens(self, item: ScheduledTokens) -> list[int]:
        """Computes a request's share of a step; what it draws."""
        request, size = item.request, self.block_size
        unknown = item.past_tokens + item.new_tokens - len(item.drafts) - len(request.token_ids)
        assert unknown <= 0 or unknown == self.num_unread == 1, f"{request.id} computes what nobody drew"
        assert not (unknown and item.drafts), f"{request.id} has drafts behind a token that nobody read"
        token_ids = request.token_ids + [self.drawn.get(request.arrival_index)] * unknown + list(item.drafts)
        written = request.blocks[item.past_tokens // size :]
        assert all(self.pool.writable(block) for block in written), f"{request.id} writes what others read"
        window = self.pool.window
        for position in range(item.past_tokens + item.new_tokens):
            is_seen = window is None or position < window.sink_tokens or position > item.past_tokens - window.tokens
            if position < item.past_tokens and not is_seen:
                continue
            slot = request.blocks[position // size] * size + position % size
            history = tuple(token_ids[: position + 1])
            if position < item.past_tokens:
                assert self.slots[slot] == history, f"{request.id} reads position {position} of another sequence"
            else:
                self.slots[slot] = history
        if not item.samples:
            return []
        known = len(token_ids) - len(item.drafts)
        tokens = [next_token(token_ids[:known])]
        for count, draft in enumerate(item.drafts, 1):
            if draft != tokens[-1]:
                break
            tokens.append(next_token(token_ids[: known + count]))
        self.drawn[request.arrival_index] = tokens[-1]
        return tokens

    def drafts(self, plan: StepPlan, sampled: dict[str, list[int]]) -> tuple[dict[str, tuple[int, ...]], int]:
        """For each draft the virtual dice say whether it is the model's next token."""
        self.num_unread -= 1
        if not plan.wanted:
            return {}, 0
        drafts = {}
        for item in plan.scheduled:
            if (wanted := plan.wanted.get(item.request.id)) is not None and item.request.state is State.RUNNING:
                token_ids = item.request.token_ids + sampled[item.request.id]
                if self.writes_ahead:
                    self._write_ahead(item.request, len(token_ids) - 1, wanted)
                found = drafts[item.request.id] = []
                for _ in range(self.dice.randint(0, wanted)):
                    is_right = self.dice.random() < self.draft_quality
                    found.append(next_token(token_ids) if is_right else self.dice.randrange(SHAPE.vocab_size))
                    token_ids = [*token_ids, found[-1]]
        return {request_id: tuple(found) for request_id, found in drafts.items() if found}, self.draft_ns

    def _write_ahead(self, request: Request, begin: int, count: int) -> None:
        """What a proposer leaves in the cache behind the known tokens. A fork that came since the step was planned may
        share the block, but reads none of these positions."""
        for position in range(begin, begin + count):
            block = request.blocks[position // self.block_size]
            self.slots[block * self.block_size + position % self.block_size] = ()


@dataclass
class SimulatedStore:
    """A slow tier whose reads and writes end when the test says so. Its contents outlive a simulation."""

    runner_host: dict[int, list]
    files: dict[bytes, list] = field(default_factory=dict)
    broken: set[bytes] = field(default_factory=set)  # keys whose reads and writes fail
    name: str = "disk"
    block_bytes: int = 100

    def __post_init__(self) -> None:
        self.under_way: list[tuple[bool, bytes, int]] = []
        self.done: list[Moved] = []
        self.clock_ns = 0

    def known(self) -> list[bytes]:
        return list(self.files)

    def read(self, key: bytes, slot: int) -> None:
        self.under_way.append((True, key, slot))

    def write(self, key: bytes, slot: int) -> None:
        self.under_way.append((False, key, slot))

    def remove(self, key: bytes) -> None:
        self.files.pop(key, None)

    def work(self, count: int) -> None:
        """Ends the oldest operations."""
        for is_read, key, slot in self.under_way[:count]:
            ok = key not in self.broken
            if is_read:
                ok = ok and key in self.files
                self.runner_host[slot] = list(self.files[key]) if ok else ["damaged"]
            elif ok:
                self.files[key] = list(self.runner_host[slot])
            self.clock_ns += 1000
            self.done.append(Moved(key, is_read, ok, self.block_bytes, self.clock_ns - 900, self.clock_ns))
        del self.under_way[:count]

    def finished(self) -> list[Moved]:
        done, self.done = self.done, []
        return done

    def wait(self) -> None:
        self.work(1)

    def close(self) -> None:
        """Nothing outlives the simulation but `files`."""


@dataclass
class SimulatedQuestions:
    """Asks a simulated store that others write to. It answers when it is listened to."""

    store: SimulatedStore
    asked: list[tuple[int, list[bytes]]] = field(default_factory=list)

    def ask(self, number: int, keys: list[bytes]) -> None:
        self.asked.append((number, keys))

    def answers(self) -> list[Answer]:
        asked, self.asked = self.asked, []
        counts = [sum(1 for _ in takewhile(self.store.files.__contains__, keys)) for _, keys in asked]
        return [Answer(number, count, 0) for (number, _), count in zip(asked, counts, strict=True)]


class Simulation:
    """An engine over the simulated device."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, prefix_caching: bool = True, policy: str = "fcfs",
        knobs: dict | None = None, overlap: bool = False, device: type[CheckedModel] = CheckedModel,
        host_blocks: int = 0, disk_blocks: int = 0, files: dict[bytes, list] | None = None, stores: str = "fill",
        window: FreedWindow | None = None, kv_events: WireFormat | None = None,
        clock: VirtualClock | None = None, peer: Callable[[dict], PeerTier] | None = None, lease_ns: int | None = None,
        by_chunk: bool = True, draft_lengths: DraftLengths | None = None, max_loras: int = 1, **limits,
    ):  # fmt: skip
        """`peer`: from this runner's host memory, where it reads prompts of a prefill server. With `lease_ns` it is
        one."""
        self.clock = clock or VirtualClock(TICK_NS)
        self.published = Published()
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32} | limits
        config = EngineConfig(model="", policy=policy, max_num_seqs=settings["max_num_seqs"], **(knobs or {}))
        eviction = make_eviction_policy(config.eviction_policy, num_blocks, config.eviction_ttl_seconds)
        pool = BlockPool(num_blocks, block_size, prefix_caching, eviction, window)
        self.block_observer = make_block_observer(config, pool)
        self.steps, self.model = KnownSteps(), device(pool)
        self.runner = SimulatedRunner(self.clock, self.steps, self.model)
        self.disk: SimulatedStore | None = None
        self.tiers: KVTiers | None = None
        if host_blocks:
            slow = []
            if disk_blocks:
                self.disk = SimulatedStore(self.model.host, {} if files is None else files)
                slow.append(SlowTier(self.disk, disk_blocks))
            self.tiers = KVTiers(
                TierIndex("host", host_blocks), slow, block_size=block_size, block_bytes=100, store_policy=stores,
                peer=None if peer is None else peer(self.model.host), hands_over=lease_ns is not None,
                clock=self.clock,
            )  # fmt: skip
        self.headers = SlotHeaders(memoryview(bytearray(HEADER_BYTES * max(1, host_blocks))), b"model")
        self.leases, self.announcements = LeaseTable(), Announcements()
        handoffs = None
        if lease_ns is not None:
            where = KVAddress("prefill", "127.0.0.1", 1)
            handoffs = Handoffs(
                self.tiers, self.leases, self.announcements, self.headers, where, block_size=block_size,
                lease_ns=lease_ns, by_chunk=by_chunk,
            )  # fmt: skip
        if kv_events is not None:
            pool.events = make_kv_event_log(block_size, kv_events, () if self.tiers is None else self.tiers.own_indexes)
        policy_of = make_policy(dict(config), pool)
        techniques = planning(
            config, self.runner, tiers=self.tiers, handoffs=handoffs, max_loras=max_loras, clock=self.clock
        )  # fmt: skip
        if draft_lengths is not None:
            techniques.append(DraftPlanning(draft_lengths))
        if drafts := next((each for each in techniques if isinstance(each, DraftPlanning)), None):
            self.model.writes_ahead = drafts.lengths.writes_ahead
        self.scheduler = Scheduler(pool, policy_of, self.block_observer, techniques=techniques, **settings)
        observer = make_observer(config, SHAPE, self.scheduler)
        self.engine = Engine(self.scheduler, self.runner, observer, self._take, overlap=overlap, clock=self.clock)
        self._begin_ns = 0
        self.submitted_ns: dict[str, int] = {}
        self._fresh = False  # the front was listened to since the last step
        self._checks = 0

    def receive(self, *messages) -> None:
        if not self.engine.has_work:
            self._begin_ns = self.clock()
        self.submitted_ns |= {m.request_id: m.encoded_ns for m in messages if isinstance(m, Submit)}
        self.engine.receive(messages, self._begin_ns)
        self._fresh = True

    def step(self) -> None:
        """One turn of the core's loop, with nothing new from the front."""
        if not self._fresh:
            self.engine.receive([], self._begin_ns)
        self._begin_ns, self._fresh = self.engine.step(), False
        self.check()

    def last_step_record(self) -> StepRecord:
        """The record of the step that was committed last."""
        return self.published.records[-1]

    def drain(self) -> None:
        while self.engine.has_work or self.engine.is_preparing:
            if self.engine.has_work:
                self.step()
            else:
                self.clock.now_ns += 100_000
                if self.disk is not None:
                    self.disk.clock_ns = max(self.disk.clock_ns, self.clock.now_ns)
                    self.disk.work(1)
                self.receive()
        self.engine.flush()
        while self.disk is not None and self.disk.under_way:
            self.disk.work(1)
            self.receive()

    def check(self) -> None:
        """The invariants that must hold between any two steps."""
        live = self.scheduler.requests.values()
        pool = self.scheduler.pool
        audit_pool(pool, [request.blocks for request in live], [request.num_committed_tokens for request in live])
        if self.tiers is not None:
            audit_tiers(self.tiers)
        self._checks += 1
        if isinstance(self.block_observer, ShadowObserver) and self._checks % 3 == 0:
            audit_observer(self.block_observer)
        counts = self.scheduler.pool.counts()
        assert counts.free + counts.active + counts.reusable == self.scheduler.pool.num_blocks
        assert self.scheduler.num_waiting == len(live) - len(self.scheduler.running)
        assert len(self.scheduler.running) <= self.scheduler.max_num_seqs

    def check_idle(self) -> None:
        """What must hold when nothing is left to do: nobody is remembered, nothing is held."""
        assert not self.engine.has_work and not self.scheduler.requests
        room = self.scheduler.waiting
        assert (room.count, room.num_in_queue) == (0, 0) and not any(room._forks.values())
        assert not self.scheduler.block_manager._waiting_forks
        counts = self.scheduler.pool.counts()
        assert counts.active == 0 and self.scheduler.pool.slots_written == 0, "a block leaked"
        assert counts.free + counts.reusable == self.scheduler.pool.num_blocks

    def _take(self, message: Tokens | Observed) -> None:
        self.published.take(message)
