"""One record of each engine step, made once its tokens are out."""

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.observer import BlockObserver
from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.techniques.lora.slots import AdapterSlots
from sojourn.engine.techniques.tiers.tiers import KVTiers
from sojourn.engine.techniques.tiers.transfers import TierCounts
from sojourn.engine.telemetry.accounting import Participants, Turn
from sojourn.metrics.records import ACTIVITIES, StepRecord


class StepRecords:
    """Knows what a record counts since the step before: idle time of the device, evictions, turns without a step."""

    def __init__(
        self, pool: BlockPool, block_observer: BlockObserver, adapters: AdapterSlots, tiers: KVTiers | None = None
    ):
        self._pool = pool
        self._block_observer = block_observer
        self._adapters = adapters
        self._adapter_evictions = 0  # up to the last record
        self._tiers = tiers
        self._evicted_blocks = 0  # up to the last record
        self._idle_since_ns = 0  # since when the device has nothing to do
        self._earlier: list[Turn] = []  # turns since the last record that committed no step

    def idle(self, until_ns: int) -> None:
        """The device had nothing to do, because no request was there."""
        self._idle_since_ns = until_ns

    def add_turn_without_step(self, turn: Turn) -> None:
        """Its stages count for the next record."""
        self._earlier.append(turn)

    def record(
        self, step: int, plan: StepPlan, outcome: StepOutcome, participants: Participants, emitted: int, turn: Turn
    ) -> StepRecord:
        """The record of a step that gave `emitted` tokens. Its costs are set where it arrives."""
        items, pool = plan.scheduled, self._pool
        free, active, reusable, pinned = pool.counts()
        device_begin_ns = max(outcome.device_begin_ns, self._idle_since_ns)  # steps of a pipeline overlap
        record = StepRecord(
            step=step,
            begin_ns=turn.begin_ns,
            end_ns=turn.end_ns,
            stages=turn.stages(),
            device_ns=outcome.device_end_ns - device_begin_ns,
            request_ids=[request.id for request in participants.planned],
            new_tokens=[item.new_tokens for item in items],
            past_tokens=[item.past_tokens for item in items],
            kinds=[item.kind for item in items],
            padding_tokens=outcome.padding_tokens,
            graph=outcome.graph,
            budget=plan.budget,
            waiting=plan.num_waiting,
            refusals=plan.refusals,
            evicted_blocks=pool.evicted_blocks - self._evicted_blocks,
            blocks_free=free,
            blocks_active=active,
            blocks_reusable=reusable,
            blocks_pinned=pinned,
            gap_ns=device_begin_ns - self._idle_since_ns,
            overrun_tokens=participants.num_overrun,
            emitted_tokens=emitted,
            slots_written=pool.slots_written,
            planned_ns=plan.planned_ns,
            device_end_ns=outcome.device_end_ns,
            sampling_ns=outcome.sampling_ns,
            logit_rows=outcome.logit_rows,
            entropy_millinats=outcome.entropy_millinats,
            nucleus_mass_ppm=outcome.nucleus_mass_ppm,
        )
        if self._adapters.loads:
            self._add_adapters(record, plan)
        self._idle_since_ns = outcome.device_end_ns + outcome.draft_ns
        self._evicted_blocks = pool.evicted_blocks
        if plan.wanted or plan.num_drafts or plan.undrafted:
            _add_drafts(record, plan, outcome)
        if self._earlier:
            record.begin_ns = self._earlier[0].begin_ns
            stages = (record.stages, *(earlier.stages() for earlier in self._earlier))
            record.stages = list(map(sum, zip(*stages, strict=True)))
            self._earlier.clear()
        for preemption in plan.preempted:
            record.preempted_ids.append(preemption.request.id)
            record.preempted_for.append(preemption.wanted_by)
            record.preempted_tokens.append(preemption.computed_tokens)
        if outcome.expert_tokens:
            record.expert_tokens = outcome.expert_tokens
            record.expert_imbalance_percent = outcome.expert_imbalance_percent
        if outcome.ranks:
            _add_ranks(record, outcome)
        if self._tiers is not None:
            _add_tiers(record, self._tiers.take_counts(), outcome)
        if self._block_observer.has_times:
            times = self._block_observer.take_times()
            record.reuse_gap_ns, record.reuse_distance_blocks = times.reuse_gap_ns, times.reuse_distance_blocks
            record.evicted_age_ns, record.evicted_idle_ns = times.evicted_age_ns, times.evicted_idle_ns
            record.shadow_evicted_blocks = times.shadow_evicted_blocks
        return record

    def _add_adapters(self, record: StepRecord, plan: StepPlan) -> None:
        """Two products of a step's tokens with the matrices of their adapters; each matrix is read once."""
        slots, used, flops = self._adapters, {}, 0
        for item in plan.scheduled:
            if (adapter := item.request.adapter) is not None:
                used[adapter.key] = adapter
                flops += 2 * item.new_tokens * adapter.parameters
        record.flops_adapters, record.adapter_bytes = flops, sum(adapter.nbytes for adapter in used.values())
        record.adapter_slots, record.adapter_loads = len(used), len(plan.adapter_loads)
        record.adapter_evictions = slots.evictions - self._adapter_evictions
        self._adapter_evictions = slots.evictions


def _add_drafts(record: StepRecord, plan: StepPlan, outcome: StepOutcome) -> None:
    record.drafts_wanted = sum(plan.wanted.values())
    record.draft_ns = outcome.draft_ns
    record.draft_flops, record.draft_bytes = outcome.draft_flops, outcome.draft_bytes
    record.undrafted = plan.undrafted
    longest = max((len(item.drafts) for item in plan.scheduled), default=0)
    drafted, accepted = [0] * longest, [0] * longest
    for item in plan.scheduled:
        count = len(outcome.sampled.get(item.request.id, ())) - 1
        for position in range(len(item.drafts)):
            drafted[position] += 1
            accepted[position] += position < count
    record.drafted_by_position, record.accepted_by_position = drafted, accepted
    record.drafted_tokens, record.accepted_tokens = sum(drafted), sum(accepted)


def _add_ranks(record: StepRecord, outcome: StepOutcome) -> None:
    record.communication_ns, record.bubble_ns = outcome.communication_ns, outcome.bubble_ns
    for name, (num_bytes, ns) in outcome.exchanges.items():
        record.exchanged_bytes[name], record.exchange_ns[name] = num_bytes, ns
    record.exchange_hidden_ns = outcome.hidden
    num_ranks = 1 + max(rank for rank, *_ in outcome.ranks)
    sums = [[0] * num_ranks for _ in ACTIVITIES]
    for rank, *times in outcome.ranks:
        for ranks, ns in zip(sums, times, strict=True):
            ranks[rank] += ns
    record.rank_busy_ns, record.rank_communication_ns, record.rank_bubble_ns = sums


def _add_tiers(record: StepRecord, counts: dict[str, TierCounts], outcome: StepOutcome) -> None:
    record.load_ns, record.store_ns = outcome.load_ns, outcome.store_ns
    record.tier_blocks = {name: tier.blocks for name, tier in counts.items()}
    for name, tier in counts.items():
        for column, amount in (
            (record.tier_loaded_bytes, tier.loaded_bytes),
            (record.tier_stored_bytes, tier.stored_bytes),
            (record.tier_load_ns, tier.load_ns),
            (record.tier_store_ns, tier.store_ns),
            (record.tier_failures, tier.failures),
            (record.tier_refused, tier.refused),
        ):
            if amount:
                column[name] = amount
        record.leases_ended.update(tier.leases_ended)
