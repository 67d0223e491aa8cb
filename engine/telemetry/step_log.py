"""What the loop tells of its steps: what its clocks and counters read, and what most steps have not.

Up to 256 steps are told together: the front, which writes the tokens, would pay for a row with every message.
"""

from array import array
from collections.abc import Sequence
from itertools import pairwise

from engine.memory.block_pool import BlockCounts, BlockPool
from engine.memory.journal import Journal
from engine.messages import STEP_ROW, ToldSteps
from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request
from engine.telemetry.accounting import Alive
from metrics.records import STAGES
from metrics.steps import Makeup, Others

BLOCK_TIMES = ("reuse_gap_ns", "reuse_distance_blocks", "evicted_age_ns", "evicted_idle_ns")
MOST_UNTOLD = 256  # steps: of fast ones, fewer than one in a hundred waits for them
UNTOLD_NS = 250_000_000  # since the first of them was committed: then all are told
_DEVICE_END = STEP_ROW.index("device_end_ns")

# Of a turn in which a step was committed: the step's number, the tokens that it emitted, the blocks then, and when the
# step before ended.
Turned = tuple[int, int, BlockCounts, int]


class StepLog:
    """Knows the steps that are untold, the step before, and the stages of turns that had none.

    A step that is the one before once more leaves a row and no mark. The books put it down themselves.
    """

    def __init__(self, pool: BlockPool, journal: Journal):
        self.pool = pool
        self.journal = journal
        self.untold = 0  # steps
        self.most_untold = MOST_UNTOLD
        self.due_ns = 0  # when the untold steps are told
        self.rows = array("q")  # theirs: numbers lie in it, where a list would keep an object for each
        self.width = 0  # sequences of the last step
        self.graph = "eager"  # ... what it ran as
        self.blocks: BlockCounts | None = None  # ... and the pool after it
        self.slots = 0
        self._marks: list[tuple[int, ...]] = []
        self._pools: list[tuple[int, ...]] = []
        self._makeups: list[Makeup] = []
        self._others: Others = []
        self._carried: list[tuple[int, int, list[int]]] = []
        self._forgotten: list[tuple[int, int]] = []
        self._stages: list[int] | None = None  # of turns that no step was told of
        self._began_ns = 0  # when the first of those turns did
        self._slept_ns = 0  # until when the device had nothing to do
        self._left_ns = 0  # when the last step that was told left the device
        self._planned: list[Request] = []  # of the last makeup: most steps have the same
        self._past = (0, -1)  # a row, and the past tokens of its first sequence if it decoded: one more in each later

    def slept(self, until_ns: int) -> None:
        """The device had nothing to do because there was nothing to do."""
        self._slept_ns = until_ns

    def pass_stages(self, readings: Sequence[int]) -> None:
        """A turn's stages count for the next step that is put down."""
        if self._stages is None:
            self._began_ns, self._stages = readings[0], [0] * len(STAGES)
        for index, (earlier, later) in enumerate(pairwise(readings)):
            self._stages[index] += later - earlier

    def put(
        self, plan: StepPlan, outcome: StepOutcome, alive: Alive, readings: list[int], turned: Turned
    ) -> ToldSteps | None:
        """A step is committed; the parameters are those of `Books.committed`, which also says what is returned."""
        step, emitted_tokens, blocks, ended_before_ns = turned
        told = None
        if readings[-1] >= self.due_ns or self.untold >= self.most_untold:
            told = self._take(ended_before_ns) if self.untold else None
            self.due_ns = readings[-1] + UNTOLD_NS
        row, past = self.untold, plan.scheduled[0][2]
        since, past_then = self._past
        if past != past_then + row - since or past_then < 0 or alive.planned is not self._planned or plan.has_prompts:
            self._makeups.append(_makeup(row, plan, alive.planned))
            self._planned = alive.planned
        self._past = (row, -1 if plan.has_prompts else past)
        self._note(row, plan, outcome)
        idle_since_ns = max(self._slept_ns, self.rows[_DEVICE_END - len(STEP_ROW)] if row else self._left_ns)
        self._marks.append(
            (row, step, ended_before_ns, idle_since_ns, emitted_tokens, outcome.padding_tokens,
             outcome.logit_rows, plan.budget, plan.num_waiting, alive.num_overrun)
        )  # fmt: skip
        readings += (outcome.device_begin_ns, outcome.device_end_ns, outcome.sampling_ns, plan.planned_ns)
        self.rows.fromlist(readings)
        width, slots = len(alive.planned), self.pool.slots_written
        self.untold = row + 1
        if not row or blocks != self.blocks or slots != self.slots + width:
            self.put_pool(blocks)
        self.width, self.slots, self.graph = width, slots, outcome.graph
        return told

    def put_pool(self, blocks: BlockCounts) -> None:
        """How the pool stands now that the last row is there."""
        self.blocks = blocks
        self._pools.append((self.untold - 1, *blocks, self.pool.evicted_blocks, self.pool.slots_written))

    def rest(self, ended_ns: int) -> ToldSteps | None:
        """What is untold, with what the journal has found since; the last step ended then."""
        if not self.untold:
            return None
        row = self.untold - 1
        self._note_times(row, {other[1]: place for place, other in enumerate(self._others) if other[0] == row})
        return self._take(ended_ns)

    def _take(self, ended_ns: int) -> ToldSteps:
        self._left_ns = self.rows[_DEVICE_END - len(STEP_ROW)]
        self._past = (self._past[0] - self.untold, self._past[1])
        told = ToldSteps(
            self.rows.tobytes(), ended_ns,
            self._marks, self._pools, self._makeups, self._others, self._carried, self._forgotten,
        )  # fmt: skip
        self.untold, self.due_ns, self.rows = 0, 0, array("q")
        self._marks, self._pools, self._makeups, self._others, self._carried, self._forgotten = ([], [], [], [], [], [])
        return told

    def _note(self, row: int, plan: StepPlan, outcome: StepOutcome) -> None:
        self._note_times(row, {})
        preempted = plan.preempted
        if (
            not preempted and not plan.refusals and self._stages is None and outcome.graph == "eager"
            and not outcome.entropy_millinats
        ):  # fmt: skip
            return
        found = {
            "graph": outcome.graph if outcome.graph != "eager" else None,
            "refusals": plan.refusals,
            "preempted_ids": [preemption.request.id for preemption in preempted],
            "preempted_for": [preemption.wanted_by for preemption in preempted],
            "preempted_tokens": [preemption.computed_tokens for preemption in preempted],
            "entropy_millinats": outcome.entropy_millinats,
            "kept_mass_ppm": outcome.kept_mass_ppm,
        }
        self._others += [(row, field, value) for field, value in found.items() if value]
        if self._stages is not None:
            self._carried.append((row, self._began_ns, self._stages))
            self._stages = None

    def _note_times(self, row: int, had: dict[str, int]) -> None:
        """Those of blocks, and how many of them the index has forgotten. `had`: where those are that it had before."""
        if not self.journal.has_times:
            return
        times = self.journal.take_times()
        for field in BLOCK_TIMES:
            if found := getattr(times, field):
                if (place := had.get(field)) is None:
                    self._others.append((row, field, found))
                else:
                    self._others[place] = (row, field, [*self._others[place][2], *found])
        if times.forgotten_blocks:
            self._forgotten.append((row, times.forgotten_blocks))


def _makeup(row: int, plan: StepPlan, planned: list[Request]) -> Makeup:
    items = plan.scheduled
    return Makeup(
        row,
        [request.id for request in planned],
        [item.kind for item in items],
        [item.new_tokens for item in items],
        [item.past_tokens for item in items],
    )
