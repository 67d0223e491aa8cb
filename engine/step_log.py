"""The record of each step: its stages, its composition and the state that it left. Its cost is worked out elsewhere."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from operator import add, sub

from engine.memory.block_pool import BlockCounts, BlockPool
from engine.memory.journal import Journal
from engine.request.accounting import Alive
from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request
from metrics.records import STAGES, StepRecord


class StepLog:
    """Owns the records of finished steps until they are taken, and the stages of turns that no record holds yet."""

    def __init__(self, pool: BlockPool, journal: Journal):
        self.records: list[StepRecord] = []
        self._pool = pool
        self._journal = journal
        self._stages: list[int] | None = None  # of turns that no record holds
        self._begin_ns: int | None = None  # when the first turn began that no record holds
        self._idle_since_ns = 0  # the device, unless a step is under way
        self._evicted = 0
        self._planned: list[Request] = []  # of the step before: most steps have the same
        self._request_ids: list[str] = []
        self._ones: list[int] = []
        self._decodes: list[str] = []

    def begin_turn(self, begin_ns: int, *, slept: bool) -> None:
        """`slept`: the device had nothing to do because there was nothing to do."""
        if slept:
            self._idle_since_ns = begin_ns
        if self._begin_ns is None:
            self._begin_ns = begin_ns

    def pass_stages(self, readings: Sequence[int]) -> None:
        """A turn's stages count for the next step that is recorded."""
        self._stages = self._stages or [0] * len(STAGES)
        for index, (earlier, later) in enumerate(pairwise(readings)):
            self._stages[index] += later - earlier

    def record(
        self, step: int, plan: StepPlan, outcome: StepOutcome, emitted_tokens: int, alive: Alive, counts: BlockCounts,
        readings: list[int], clock: Callable[[], int],
    ) -> int:  # fmt: skip
        """A step is over: `readings` bound the stages of its turn but the last. Returns when that ended."""
        items = plan.scheduled
        past_tokens = [item[2] for item in items]  # by place: names take twice the time
        if alive.planned != self._planned:
            self._planned = alive.planned
            self._request_ids = [request.id for request in alive.planned]
            self._ones, self._decodes = [1] * len(items), ["decode"] * len(items)
        if plan.has_prompts:
            new_tokens, kinds = [item.new_tokens for item in items], [item.kind for item in items]
        else:
            new_tokens, kinds = self._ones, self._decodes
        evicted, times = self._pool.evicted_blocks, self._journal.take_times()
        end_ns = clock()
        readings.append(end_ns)
        stages = list(map(sub, readings[1:], readings))
        if self._stages is not None:
            stages, self._stages = list(map(add, stages, self._stages)), None
        preempted = plan.preempted
        self.records.append(
            StepRecord(
                step=step,
                begin_ns=self._begin_ns,
                end_ns=end_ns,
                stages=stages,
                device_ns=outcome.device_ns,
                request_ids=self._request_ids,
                new_tokens=new_tokens,
                past_tokens=past_tokens,
                kinds=kinds,
                padding_tokens=outcome.padding_tokens,
                graph=outcome.graph,
                budget=plan.budget,
                waiting=plan.num_waiting,
                refusals=plan.refusals,
                preempted_ids=[preemption.request.id for preemption in preempted] if preempted else [],
                evicted_blocks=evicted - self._evicted,
                blocks_free=counts.free,
                blocks_active=counts.active,
                blocks_reusable=counts.reusable,
                blocks_pinned=counts.pinned,
                flops=0,
                bytes=0,
                predicted_ns=None,
                gap_ns=outcome.device_begin_ns - self._idle_since_ns,
                overrun_tokens=alive.num_overrun,
                emitted_tokens=emitted_tokens,
                slots_written=self._pool.slots_written,
                reuse_gap_ns=times.reuse_gap_ns,
                reuse_distance_blocks=times.reuse_distance_blocks,
                evicted_age_ns=times.evicted_age_ns,
                evicted_idle_ns=times.evicted_idle_ns,
                forgotten_blocks=times.forgotten_blocks,
                preempted_for=[preemption.wanted_by for preemption in preempted] if preempted else [],
                preempted_tokens=[preemption.computed_tokens for preemption in preempted] if preempted else [],
                planned_ns=plan.planned_ns,
                device_end_ns=outcome.device_end_ns,
                sampling_ns=outcome.sampling_ns,
                logit_rows=outcome.logit_rows,
                entropy_millinats=outcome.entropy_millinats,
                kept_mass_ppm=outcome.kept_mass_ppm,
            )
        )
        self._evicted = evicted
        self._begin_ns = None
        self._idle_since_ns = outcome.device_end_ns
        return end_ns

    def take(self) -> list[StepRecord]:
        """The records that were not taken yet."""
        records, self.records = self.records, []
        return records
