"""The record of each step: its stages, its composition and the state that it left. Its cost is worked out elsewhere."""

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from engine.memory.block_pool import BlockCounts, BlockPool
from engine.memory.journal import BlockTimes, Journal
from engine.request.accounting import Alive
from engine.request.plan import StepOutcome, StepPlan
from engine.request.request import Request
from metrics.records import STAGES
from metrics.step_batch import NUMBERS, Makeup, StepBatch

# A batch is sent so long after its first step ended: telling steps one by one would cost more than making them, and the
# front, while it works on a batch, writes no token. What it does for a batch hardly depends on how many steps it has.
HOLD_NS = 2_000_000_000
MOST_STEPS = 4_096  # of a batch

# A row as the loop writes it: readings of clocks and counters, as they are. What NUMBERS are besides is worked out for
# a whole batch. Rows lie in one buffer: an object for each number would have to be fetched from memory again.
_READINGS = tuple(f"reading_{place}" for place in range(len(STAGES) + 1))
_RAW = (
    "step", "begin_ns", "device_begin_ns", "device_end_ns", "idle_since_ns", "sampling_ns", "planned_ns",
    "padding_tokens", "logit_rows", "budget", "waiting", "blocks_free", "blocks_active", "blocks_reusable",
    "blocks_pinned", "evicted_so_far", "slots_written", "overrun_tokens", "emitted_tokens", *_READINGS,
)  # fmt: skip
_ROW = struct.Struct(f"{len(_RAW)}q")


class StepLog:
    """Owns the rows of finished steps until they are taken, and the stages of turns that no row holds yet."""

    def __init__(self, pool: BlockPool, journal: Journal, hold_ns: int = HOLD_NS):
        self._pool = pool
        self._journal = journal
        self._hold_ns = hold_ns
        self.due_ns: int | None = None  # when the batch is sent
        self._rows = bytearray(MOST_STEPS * _ROW.size)
        self._num_rows = 0
        self._makeups: list[Makeup] = []
        self._others: list[tuple[int, str, Any]] = []
        self._carried: list[tuple[int, list[int]]] = []  # row, and stages of turns before its own
        self._forgotten: list[tuple[int, int]] = []  # row, and blocks that the shadow index forgot
        self._stages: list[int] | None = None  # of turns that no row holds
        self._begin_ns = 0  # when the first of those turns began
        self._idle_since_ns = 0  # the device, unless a step is under way
        self._evicted = 0  # before the first row
        self._planned: list[Request] = []  # of the last makeup: most steps have the same
        self._next_past = -1  # ... of its first sequence, if it stands for the next step, too

    def slept(self, until_ns: int) -> None:
        """The device had nothing to do because there was nothing to do."""
        self._idle_since_ns = until_ns

    def pass_stages(self, readings: Sequence[int]) -> None:
        """A turn's stages count for the next step that is recorded."""
        if self._stages is None:
            self._begin_ns, self._stages = readings[0], [0] * len(STAGES)
        for index, (earlier, later) in enumerate(pairwise(readings)):
            self._stages[index] += later - earlier

    def record(
        self, step: int, plan: StepPlan, outcome: StepOutcome, emitted_tokens: int, alive: Alive, counts: BlockCounts,
        readings: list[int], clock: Callable[[], int],
    ) -> int:  # fmt: skip
        """A step is over: `readings` bound the stages of its turn but the last. Returns when that ended. Who
        records asks `take` after each step: it gives MOST_STEPS at the latest."""
        row = self._num_rows
        past = plan.scheduled[0][2]
        if past == self._next_past and alive.planned is self._planned and not plan.has_prompts:
            self._next_past = past + 1
        else:
            self._begin_makeup(row, plan, alive.planned)
        pool, times = self._pool, self._journal.take_times()
        if times is not None:
            self._note_times(row, times)
        if plan.refusals or plan.preempted or outcome.graph != "eager" or outcome.entropy_millinats:
            self._note_others(row, plan, outcome)
        # By name: a starred argument would make a list and a tuple of all that are given.
        begun, received, planned, prepared, launched, waited, sampled, committed = readings
        begin_ns = begun
        if self._stages is not None:
            begin_ns = self._begin_ns
            self._carried.append((row, self._stages))
            self._stages = None
        device_end_ns = outcome.device_end_ns
        end_ns = clock()
        _ROW.pack_into(
            self._rows, row * _ROW.size,
            step, begin_ns, outcome.device_begin_ns, device_end_ns, self._idle_since_ns, outcome.sampling_ns,
            plan.planned_ns, outcome.padding_tokens, outcome.logit_rows, plan.budget, plan.num_waiting, counts.free,
            counts.active, counts.reusable, counts.pinned, pool.evicted_blocks, pool.slots_written, alive.num_overrun,
            emitted_tokens, begun, received, planned, prepared, launched, waited, sampled, committed, end_ns,
        )  # fmt: skip
        if not row:
            self.due_ns = end_ns + self._hold_ns
        self._num_rows = row + 1
        self._idle_since_ns = device_end_ns
        return end_ns

    def take(self, now_ns: int | None = None) -> StepBatch | None:
        """The steps that were not taken yet, if they are due by then."""
        count = self._num_rows
        if not count or (now_ns is not None and now_ns < self.due_ns and count < MOST_STEPS):
            return None
        batch = StepBatch(self._numbers(count).tobytes(), self._makeups, self._others)
        self._num_rows, self._makeups, self._others, self._carried, self._forgotten = 0, [], [], [], []
        self._next_past, self.due_ns = -1, None
        return batch

    def _numbers(self, count: int) -> np.ndarray:
        """Rows by NUMBERS: int64 [count, NUMBERS]."""
        raw = np.frombuffer(self._rows, np.int64, count * len(_RAW)).reshape(count, len(_RAW))
        known = dict(zip(_RAW, raw.T, strict=True))
        stages = np.diff(raw[:, -len(_READINGS) :], axis=1)
        for row, carried in self._carried:
            stages[row] += carried
        known |= dict(zip((f"stage_{stage}_ns" for stage in STAGES), stages.T, strict=True))
        known["end_ns"] = known[_READINGS[-1]]
        known["device_ns"] = known["device_end_ns"] - known["device_begin_ns"]
        known["gap_ns"] = known["device_begin_ns"] - known["idle_since_ns"]
        evicted = known["evicted_so_far"]
        known["evicted_blocks"] = np.diff(evicted, prepend=self._evicted)
        self._evicted = int(evicted[-1])
        known["forgotten_blocks"] = np.zeros(count, np.int64)
        for row, forgotten in self._forgotten:
            known["forgotten_blocks"][row] = forgotten
        return np.stack([known[name] for name in NUMBERS], axis=1)

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
        self._forgotten.append((row, times.forgotten_blocks))
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
