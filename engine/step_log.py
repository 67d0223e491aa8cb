"""The record of each step: its stages, its composition and the state that it left. Its cost is worked out elsewhere."""

from array import array
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from operator import add, sub
from typing import Any

from engine.memory.block_pool import BlockCounts, BlockPool
from engine.memory.journal import BlockTimes, Journal
from engine.request.accounting import Alive
from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request
from metrics.records import STAGES
from metrics.step_batch import Makeup, StepBatch

# A batch is sent so long after its first step ended: telling steps one by one would cost more than making them, and the
# front, while it works on a batch, writes no token.
HOLD_NS = 1_000_000_000
MOST_STEPS = 4_096  # of a batch


class StepLog:
    """Owns the rows of finished steps until they are taken, and the stages of turns that no row holds yet."""

    def __init__(self, pool: BlockPool, journal: Journal, hold_ns: int = HOLD_NS):
        self._pool = pool
        self._journal = journal
        self._hold_ns = hold_ns
        self.due_ns: int | None = None  # when the batch is sent
        self._rows: list[tuple[int, ...]] = []  # by metrics.step_batch.NUMBERS
        self._makeups: list[Makeup] = []
        self._others: list[tuple[int, str, Any]] = []
        self._stages: list[int] | None = None  # of turns that no row holds
        self._begin_ns: int | None = None  # when the first turn began that no row holds
        self._idle_since_ns = 0  # the device, unless a step is under way
        self._evicted = 0
        self._planned: list[Request] = []  # of the last makeup: most steps have the same
        self._next_past = -1  # ... of its first sequence, if it stands for the next step, too

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
        row = len(self._rows)
        past = plan.scheduled[0][2]
        if past == self._next_past and alive.planned is self._planned and not plan.has_prompts:
            self._next_past = past + 1
        else:
            self._begin_makeup(row, plan, alive.planned)
        pool, times = self._pool, self._journal.take_times()
        evicted = pool.evicted_blocks
        if times is not None:
            self._note_times(row, times)
        if plan.refusals or plan.preempted or outcome.graph != "eager" or outcome.entropy_millinats:
            self._note_others(row, plan, outcome)
        end_ns = clock()
        readings.append(end_ns)
        stages = map(sub, readings[1:], readings)
        if self._stages is not None:
            stages, self._stages = map(add, stages, self._stages), None
        device_begin_ns, device_end_ns = outcome.device_begin_ns, outcome.device_end_ns
        self._rows.append((
            step, self._begin_ns, end_ns, *stages, device_end_ns - device_begin_ns, outcome.padding_tokens, plan.budget,
            plan.num_waiting, evicted - self._evicted, counts.free, counts.active, counts.reusable, counts.pinned,
            device_begin_ns - self._idle_since_ns, alive.num_overrun, emitted_tokens, pool.slots_written,
            0 if times is None else times.forgotten_blocks, plan.planned_ns, device_end_ns, outcome.sampling_ns,
            outcome.logit_rows,
        ))  # fmt: skip
        if not row:
            self.due_ns = end_ns + self._hold_ns
        self._evicted = evicted
        self._begin_ns = None
        self._idle_since_ns = device_end_ns
        return end_ns

    def take(self, now_ns: int | None = None) -> StepBatch | None:
        """The steps that were not taken yet, if they are due by then."""
        rows = self._rows
        if not rows or (now_ns is not None and now_ns < self.due_ns and len(rows) < MOST_STEPS):
            return None
        batch = StepBatch(array("q", chain.from_iterable(rows)).tobytes(), self._makeups, self._others)
        self._rows, self._makeups, self._others = [], [], []
        self._next_past, self.due_ns = -1, None
        return batch

    def _begin_makeup(self, row: int, plan: StepPlan, planned: list[Request]) -> None:
        items = plan.scheduled
        self._makeups.append(
            Makeup(
                row,
                [request.id for request in planned],
                [item.kind for item in items],
                [item.new_tokens for item in items],
                [item.past_tokens for item in items],
            )
        )
        self._planned = planned
        self._next_past = -1 if plan.has_prompts else items[0].past_tokens + 1

    def _note_times(self, row: int, times: BlockTimes) -> None:
        for field in ("reuse_gap_ns", "reuse_distance_blocks", "evicted_age_ns", "evicted_idle_ns"):
            if values := getattr(times, field):
                self._others.append((row, field, values))

    def _note_others(self, row: int, plan: StepPlan, outcome: StepOutcome) -> None:
        preempted = plan.preempted
        told = {
            "graph": outcome.graph if outcome.graph != "eager" else None,
            "refusals": plan.refusals,
            "preempted_ids": [preemption.request.id for preemption in preempted],
            "preempted_for": [preemption.wanted_by for preemption in preempted],
            "preempted_tokens": [preemption.computed_tokens for preemption in preempted],
            "entropy_millinats": outcome.entropy_millinats,
            "kept_mass_ppm": outcome.kept_mass_ppm,
        }
        self._others += [(row, field, value) for field, value in told.items() if value]
