"""The front's side of steps: their rows, as messages tell them, until somebody takes them as columns."""

from array import array

import numpy as np
from msgspec.structs import replace

from engine.messages import STEP_ROW, ToldSteps
from metrics.records import STAGES
from metrics.step_batch import NUMBERS, Makeup, Others, Steps

# So long are steps kept to be worked out together: what that takes hardly depends on how many they are, and meanwhile
# the front writes no token.
HOLD_NS = 5_000_000_000
_COLUMNS = len(STEP_ROW)
_COMMITTED = STEP_ROW.index(f"{STAGES[-1]}_began_ns")
_BOUNDS = [*(STEP_ROW.index(f"{stage}_began_ns") for stage in STAGES), STEP_ROW.index("end_ns")]


class StepRows:
    """The steps of one core."""

    def __init__(self, hold_ns: int = HOLD_NS):
        self._hold_ns = hold_ns
        self._rows = array("q")  # one after the other; numbers lie in it, where a list would keep an object for each
        self._makeups: list[Makeup] = []  # the first is that of the first row, or would be if it brought none
        self._others: Others = []
        self._carried: list[tuple[int, int, list[int]]] = []
        self._forgotten: list[tuple[int, int]] = []
        self._evicted = 0  # before the first row

    def add(self, told: ToldSteps) -> None:
        """What messages of a core tell, in their order."""
        row = len(self._rows) // _COLUMNS
        self._rows.frombytes(told.rows)
        if told.makeups and row + told.makeups[0].first_row == 0:
            self._makeups.clear()
        self._makeups += [replace(makeup, first_row=row + makeup.first_row) for makeup in told.makeups]
        self._others += [(row + at, field, value) for at, field, value in told.others]
        self._carried += [(row + at, *turns) for at, *turns in told.carried]
        self._forgotten += [(row + at, blocks) for at, blocks in told.forgotten]

    def take(self, now_ns: int | None = None) -> Steps | None:
        """All of them, if they are due by then; without a time at once. None: none. What they cost is to be worked
        out."""
        if not self._rows or (now_ns is not None and now_ns < self._rows[_COMMITTED] + self._hold_ns):
            return None
        rows = np.array(self._rows, np.int64).reshape(-1, _COLUMNS)
        steps = Steps.uncosted(len(rows), self._makeups, self._others)
        self._fill(steps, dict(zip(STEP_ROW, rows.T, strict=True)), rows[:, _BOUNDS])
        last = self._makeups[-1]
        later = len(rows) - last.first_row
        self._makeups = [replace(last, first_row=0, past_tokens=[past + later for past in last.past_tokens])]
        self._rows, self._others, self._carried, self._forgotten = array("q"), [], [], []
        return steps

    def _fill(self, steps: Steps, known: dict[str, np.ndarray], bounds: np.ndarray) -> None:
        """The columns of NUMBERS; `bounds` [steps, stages + 1] of the stages."""
        steps.stages[:] = np.diff(bounds, axis=1).T
        begin_ns, forgotten = bounds[:, 0].copy(), np.zeros(len(bounds), np.int64)
        for row, began_ns, stages in self._carried:
            begin_ns[row] = began_ns
            steps.stages[:, row] += stages
        for row, blocks in self._forgotten:
            forgotten[row] += blocks
        evicted = known["evicted_so_far"]
        worked_out = {
            "begin_ns": begin_ns,
            "device_ns": known["device_end_ns"] - known["device_begin_ns"],
            "gap_ns": known["device_begin_ns"] - known["idle_since_ns"],
            "evicted_blocks": np.diff(evicted, prepend=self._evicted),
            "forgotten_blocks": forgotten,
        }
        self._evicted = int(evicted[-1])
        for name in NUMBERS:
            if not name.startswith("stage_"):
                steps[name][:] = worked_out[name] if name in worked_out else known[name]
