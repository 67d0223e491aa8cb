"""One record of each engine step, made once its tokens are out."""

from engine.memory.block_pool import BlockPool
from engine.memory.journal import Journal
from engine.request.plan import StepOutcome, StepPlan
from engine.telemetry.accounting import Participants
from engine.telemetry.turn import Turn
from metrics.records import StepRecord


class StepRecords:
    """Knows what a record counts since the step before: idle time of the device, evictions, turns without a step."""

    def __init__(self, pool: BlockPool, journal: Journal):
        self._pool = pool
        self._journal = journal
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
        items, pool, preempted = plan.scheduled, self._pool, plan.preempted
        begin_ns, stages = turn.begin_ns, turn.stages()
        if self._earlier:
            begin_ns = self._earlier[0].begin_ns
            stages = list(map(sum, zip(stages, *(each.stages() for each in self._earlier), strict=True)))
            self._earlier.clear()
        gap_ns = outcome.device_begin_ns - self._idle_since_ns
        self._idle_since_ns = outcome.device_end_ns
        evicted_blocks = pool.evicted_blocks - self._evicted_blocks
        self._evicted_blocks = pool.evicted_blocks
        times = self._journal.take_times()
        free, active, reusable, pinned = pool.counts()
        return StepRecord(
            step=step,
            begin_ns=begin_ns,
            end_ns=turn.end_ns,
            stages=stages,
            device_ns=outcome.device_ns,
            request_ids=[request.id for request in participants.planned],
            new_tokens=[item.new_tokens for item in items],
            past_tokens=[item.past_tokens for item in items],
            kinds=[item.kind for item in items],
            padding_tokens=outcome.padding_tokens,
            graph=outcome.graph,
            budget=plan.budget,
            waiting=plan.num_waiting,
            refusals=plan.refusals,
            preempted_ids=[preemption.request.id for preemption in preempted],
            preempted_for=[preemption.wanted_by for preemption in preempted],
            preempted_tokens=[preemption.computed_tokens for preemption in preempted],
            evicted_blocks=evicted_blocks,
            blocks_free=free,
            blocks_active=active,
            blocks_reusable=reusable,
            blocks_pinned=pinned,
            gap_ns=gap_ns,
            overrun_tokens=participants.num_overrun,
            emitted_tokens=emitted,
            slots_written=pool.slots_written,
            reuse_gap_ns=times.reuse_gap_ns,
            reuse_distance_blocks=times.reuse_distance_blocks,
            evicted_age_ns=times.evicted_age_ns,
            evicted_idle_ns=times.evicted_idle_ns,
            forgotten_blocks=times.forgotten_blocks,
            planned_ns=plan.planned_ns,
            device_end_ns=outcome.device_end_ns,
            sampling_ns=outcome.sampling_ns,
            logit_rows=outcome.logit_rows,
            entropy_millinats=outcome.entropy_millinats,
            kept_mass_ppm=outcome.kept_mass_ppm,
        )
