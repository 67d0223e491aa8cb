"""What the loop tells of each step: what its clocks and counters read, and what most steps have not."""

from collections.abc import Sequence
from itertools import pairwise

from engine.memory.block_pool import BlockPool
from engine.memory.journal import Journal
from engine.messages import Beside, pack_row
from engine.request.accounting import Alive
from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request
from metrics.records import STAGES
from metrics.step_batch import Makeup, Others

BLOCK_TIMES = ("reuse_gap_ns", "reuse_distance_blocks", "evicted_age_ns", "evicted_idle_ns")


class StepLog:
    """Knows the step before, and the stages of turns that had none."""

    def __init__(self, pool: BlockPool, journal: Journal):
        self._pool = pool
        self._journal = journal
        self._stages: list[int] | None = None  # of turns that no step was told of
        self._began_ns = 0  # when the first of those turns did
        self._idle_since_ns = 0  # the device, unless a step is under way
        self._planned: list[Request] = []  # of the last makeup: most steps have the same
        self._next_past = -1  # ... of its first sequence, if it stands for the next step, too

    def slept(self, until_ns: int) -> None:
        """The device had nothing to do because there was nothing to do."""
        self._idle_since_ns = until_ns

    def pass_stages(self, readings: Sequence[int]) -> None:
        """A turn's stages count for the next step that is told."""
        if self._stages is None:
            self._began_ns, self._stages = readings[0], [0] * len(STAGES)
        for index, (earlier, later) in enumerate(pairwise(readings)):
            self._stages[index] += later - earlier

    def tell(
        self, plan: StepPlan, outcome: StepOutcome, alive: Alive, readings: list[int]
    ) -> tuple[bytes, Beside | None]:
        """A step is committed: its row and what belongs beside it. `readings` as `Books.committed` has them."""
        pool, past, device_end_ns, beside = self._pool, plan.scheduled[0][2], outcome.device_end_ns, None
        shares = past == self._next_past and alive.planned is self._planned and not plan.has_prompts
        if (
            not shares or self._journal.has_times or plan.refusals or plan.preempted or self._stages is not None
            or outcome.graph != "eager" or outcome.entropy_millinats
        ):  # fmt: skip
            beside = self._beside(plan, outcome, None if shares else _makeup(plan, alive.planned))
            self._planned = alive.planned
        self._next_past = -1 if plan.has_prompts else past + 1
        row = pack_row(
            *readings, outcome.device_begin_ns, device_end_ns, self._idle_since_ns, outcome.sampling_ns,
            plan.planned_ns, outcome.padding_tokens, outcome.logit_rows, plan.budget, plan.num_waiting,
            pool.evicted_blocks, pool.slots_written, alive.num_overrun,
        )  # fmt: skip
        self._idle_since_ns = device_end_ns
        return row, beside

    def tell_late(self) -> Beside | None:
        """What the journal has found since the last step."""
        others, forgotten = self._times()
        return Beside(None, others, forgotten, None) if others or forgotten else None

    def _beside(self, plan: StepPlan, outcome: StepOutcome, makeup: Makeup | None) -> Beside:
        preempted, (others, forgotten) = plan.preempted, self._times()
        told = {
            "graph": outcome.graph if outcome.graph != "eager" else None,
            "refusals": plan.refusals,
            "preempted_ids": [preemption.request.id for preemption in preempted],
            "preempted_for": [preemption.wanted_by for preemption in preempted],
            "preempted_tokens": [preemption.computed_tokens for preemption in preempted],
            "entropy_millinats": outcome.entropy_millinats,
            "kept_mass_ppm": outcome.kept_mass_ppm,
        }
        others += [(0, field, value) for field, value in told.items() if value]
        carried = None if self._stages is None else (self._began_ns, self._stages)
        self._stages = None
        return Beside(makeup, others, forgotten, carried)

    def _times(self) -> tuple[Others, int]:
        """Those of blocks, and how many of them the index has forgotten."""
        if not self._journal.has_times:
            return [], 0
        times = self._journal.take_times()
        told = {field: getattr(times, field) for field in BLOCK_TIMES}
        return [(0, field, value) for field, value in told.items() if value], times.forgotten_blocks


def _makeup(plan: StepPlan, planned: list[Request]) -> Makeup:
    items = plan.scheduled
    return Makeup(
        0,
        [request.id for request in planned],
        [item.kind for item in items],
        [item.new_tokens for item in items],
        [item.past_tokens for item in items],
    )
