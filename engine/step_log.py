"""What the loop tells of its steps: what its clocks and counters read, and what most steps have not.

Some dozens of steps are told together: the front, which writes the tokens, would pay for a row with every message.
"""

from collections.abc import Sequence
from itertools import pairwise
from struct import Struct
from typing import Unpack

from engine.memory.block_pool import BlockCounts, BlockPool
from engine.memory.journal import Journal
from engine.messages import STEP_ROW, ToldSteps
from engine.request.accounting import Alive
from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request
from metrics.records import STAGES
from metrics.step_batch import Makeup, Others

BLOCK_TIMES = ("reuse_gap_ns", "reuse_distance_blocks", "evicted_age_ns", "evicted_idle_ns")
MOST_UNTOLD = 64  # steps
UNTOLD_NS = 250_000_000  # since the first of them was committed: then all are told
MOST_LATER = 8  # steady steps that wait to be put down together
_ROW = Struct(f"={len(STEP_ROW)}q")

# Of a turn in which a step was committed: the step's number, the tokens that it emitted, the blocks then, and when the
# step before ended.
Turned = tuple[int, int, BlockCounts, int]


# A step that was committed: its plan and outcome, the readings of its turn, and the pool's slots written and blocks
# evicted then.
PutDown = tuple[StepPlan, StepOutcome, list[int], Turned, int, int]


class StepLog:
    """Knows the steps that are untold, the step before, and the stages of turns that had none.

    Steady steps wait in `later`, where the books append them until there are some, or one is due: each of them by
    itself would fetch code and rows from memory, where the model has driven them. None of them has times of blocks.
    """

    def __init__(self, pool: BlockPool, journal: Journal):
        self.pool = pool
        self.journal = journal
        self.later: list[PutDown] = []
        self.most_later = 0
        self.due_ns = 0  # when the untold steps are told
        self._rows = bytearray(_ROW.size * (MOST_UNTOLD + 1))
        self._num_rows = 0
        self._marks: list[tuple[int, ...]] = []
        self._pools: list[tuple[int, ...]] = []
        self._makeups: list[Makeup] = []
        self._others: Others = []
        self._carried: list[tuple[int, int, list[int]]] = []
        self._forgotten: list[tuple[int, int]] = []
        self._stages: list[int] | None = None  # of turns that no step was told of
        self._began_ns = 0  # when the first of those turns did
        self._idle_since_ns = 0  # the device, unless a step is under way
        self._alive: Alive | None = None  # in the last step that has a row
        self._next_past = -1  # of its first sequence in the next step, if its makeup stands for that, too
        self._blocks: BlockCounts | None = None  # of that step, as are the slots that were written by then
        self._slots = 0

    @property
    def untold(self) -> int:
        """Steps."""
        return self._num_rows + len(self.later)

    def slept(self, until_ns: int) -> None:
        """The device had nothing to do because there was nothing to do."""
        self._put_later()
        self._idle_since_ns = until_ns

    def pass_stages(self, readings: Sequence[int]) -> None:
        """A turn's stages count for the next step that is put down."""
        self._put_later()
        if self._stages is None:
            self._began_ns, self._stages = readings[0], [0] * len(STAGES)
        for index, (earlier, later) in enumerate(pairwise(readings)):
            self._stages[index] += later - earlier

    def put(self, alive: Alive, *step: Unpack[PutDown]) -> ToldSteps | None:
        """A step is committed. What `Books.committed` returns."""
        (_, _, readings, (*_, ended_before_ns), _, _), told = step, None
        self._put_later()
        if readings[-1] >= self.due_ns or self._num_rows >= MOST_UNTOLD:
            told = self._take(ended_before_ns) if self._num_rows else None
            self.due_ns = readings[-1] + UNTOLD_NS
        self._put(alive, *step)
        self._note_times(self._num_rows - 1, {})
        self.most_later = min(MOST_LATER, MOST_UNTOLD - self._num_rows)
        return told

    def _put_later(self) -> None:
        """Those of `later`. One that is the step before once more takes no mark."""
        if not self.later:
            return
        alive, rows, row = self._alive, self._rows, self._num_rows
        width = len(alive.planned)
        for step in self.later:
            plan, outcome, readings, turned, slots, evicted = step
            if turned[1] != width or plan.refusals or outcome.entropy_millinats or outcome.graph != "eager":
                self._num_rows = row
                self._put(alive, *step)
            else:
                self._idle_since_ns = outcome.device_end_ns
                _ROW.pack_into(
                    rows, row * _ROW.size, *readings, outcome.device_begin_ns, outcome.device_end_ns,
                    outcome.sampling_ns, plan.planned_ns,
                )  # fmt: skip
                if turned[2] != self._blocks or slots != self._slots + width:
                    self._blocks = turned[2]
                    self._pools.append((row, *turned[2], evicted, slots))
                self._slots, self._next_past = slots, self._next_past + 1
            row += 1
        self._num_rows = row
        self.later.clear()

    def _put(
        self, alive: Alive, plan: StepPlan, outcome: StepOutcome, readings: list[int], turned: Turned, slots: int,
        evicted: int,
    ) -> None:  # fmt: skip
        row, (step, emitted_tokens, blocks, ended_before_ns) = self._num_rows, turned
        past, device_end_ns = plan.scheduled[0][2], outcome.device_end_ns
        if past != self._next_past or self._alive is None or alive.planned is not self._alive.planned or plan.has_prompts:
            self._makeups.append(_makeup(row, plan, alive.planned))
        self._next_past = -1 if plan.has_prompts else past + 1
        if (
            plan.refusals or plan.preempted or self._stages is not None or outcome.graph != "eager"
            or outcome.entropy_millinats
        ):  # fmt: skip
            self._note(row, plan, outcome)
        _ROW.pack_into(
            self._rows, row * _ROW.size, *readings, outcome.device_begin_ns, device_end_ns, outcome.sampling_ns,
            plan.planned_ns,
        )  # fmt: skip
        self._marks.append(
            (row, step, ended_before_ns, self._idle_since_ns, emitted_tokens, outcome.padding_tokens,
             outcome.logit_rows, plan.budget, plan.num_waiting, alive.num_overrun)
        )  # fmt: skip
        self._pools.append((row, *blocks, evicted, slots))
        self._idle_since_ns, self._alive, self._blocks, self._slots = device_end_ns, alive, blocks, slots
        self._num_rows = row + 1

    def rest(self, ended_ns: int) -> ToldSteps | None:
        """What is untold, with what the journal has found since; the last step ended then."""
        if not self.untold:
            return None
        self._put_later()
        row = self._num_rows - 1
        self._note_times(row, {other[1]: place for place, other in enumerate(self._others) if other[0] == row})
        return self._take(ended_ns)

    def _take(self, ended_ns: int) -> ToldSteps:
        told = ToldSteps(
            bytes(memoryview(self._rows)[: self._num_rows * _ROW.size]), ended_ns,
            self._marks, self._pools, self._makeups, self._others, self._carried, self._forgotten,
        )  # fmt: skip
        self._num_rows = self.due_ns = 0
        self._marks, self._pools, self._makeups, self._others, self._carried, self._forgotten = (
            [], [], [], [], [], []
        )
        return told

    def _note(self, row: int, plan: StepPlan, outcome: StepOutcome) -> None:
        preempted = plan.preempted
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
