"""One record of each engine step, made once its tokens are out."""

from collections.abc import Sequence

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.observer import BlockObserver
from sojourn.engine.request.plan import StepOutcome, StepPlan
from sojourn.engine.request.technique import Technique
from sojourn.engine.telemetry.accounting import Participants, Turn
from sojourn.metrics.records import StepRecord
from sojourn.metrics.records.step import Distribution, Experts, Preemptions


class StepRecords:
    """Knows what a record counts since the step before: idle time of the device, evictions, turns without a step."""

    def __init__(self, pool: BlockPool, block_observer: BlockObserver, techniques: Sequence[Technique] = ()):
        self._pool = pool
        self._block_observer = block_observer
        self._techniques = techniques
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
        free, active, reusable = pool.counts()
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
            gap_ns=device_begin_ns - self._idle_since_ns,
            overrun_tokens=participants.num_overrun,
            emitted_tokens=emitted,
            slots_written=pool.slots_written,
            planned_ns=plan.planned_ns,
            device_end_ns=outcome.device_end_ns,
            sampling_ns=outcome.sampling_ns,
            logit_rows=outcome.logit_rows,
        )
        if outcome.entropy_millinats:
            record.distribution = Distribution(
                entropy_millinats=outcome.entropy_millinats, nucleus_mass_ppm=outcome.nucleus_mass_ppm
            )
        for technique in self._techniques:
            technique.record(record, plan, outcome)
        self._idle_since_ns = outcome.device_end_ns + outcome.draft_ns
        self._evicted_blocks = pool.evicted_blocks
        if self._earlier:
            record.begin_ns = self._earlier[0].begin_ns
            stages = (record.stages, *(earlier.stages() for earlier in self._earlier))
            record.stages = list(map(sum, zip(*stages, strict=True)))
            self._earlier.clear()
        if plan.preempted:
            record.preemptions = Preemptions(
                preempted_ids=[each.request.id for each in plan.preempted],
                preempted_for=[each.wanted_by for each in plan.preempted],
                preempted_tokens=[each.computed_tokens for each in plan.preempted],
            )
        if outcome.expert_tokens:
            record.experts = Experts(
                expert_tokens=outcome.expert_tokens, expert_imbalance_percent=outcome.expert_imbalance_percent
            )
        if self._block_observer.has_times:
            record.reuse = self._block_observer.take_times()
        return record
