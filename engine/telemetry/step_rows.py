"""The front's side of steps: their rows, as messages tell them, until somebody takes them as columns."""

from array import array

import numpy as np
from msgspec.structs import replace

from engine.messages import POOL_MARK, STEP_MARK, STEP_ROW, ToldSteps
from metrics.records import STAGES
from metrics.steps import NUMBERS, Makeup, Others, Steps

# So long are steps kept to be worked out together: what that takes hardly depends on how many they are, and meanwhile
# the front writes no token.
HOLD_NS = 5_000_000_000
_COLUMNS = len(STEP_ROW)
_COMMITTED = STEP_ROW.index(f"{STAGES[-1]}_began_ns")
_STANDING = ("padding_tokens", "logit_rows", "budget")  # of a mark: as long as no other comes
_OF_ONE = ("waiting", "overrun_tokens")  # ... of its own step alone
_BLOCKS = ("blocks_free", "blocks_active", "blocks_reusable", "blocks_pinned")
_Columns = dict[str, np.ndarray]


class StepRows:
    """The steps of one core."""

    def __init__(self, hold_ns: int = HOLD_NS):
        self._hold_ns = hold_ns
        self._rows = array("q")  # one after the other; numbers lie in it, where a list would keep an object for each
        self._ended_ns = 0  # the last of them
        self._marks: list[list[int]] = []
        self._pools: list[list[int]] = []
        self._makeups: list[Makeup] = []  # the first is that of the first row, or would be if it brought none
        self._others: Others = []
        self._carried: list[tuple[int, int, list[int]]] = []
        self._forgotten: list[tuple[int, int]] = []
        self._evicted = 0  # before the first row

    def add(self, told: ToldSteps) -> None:
        """What messages of a core tell, in their order."""
        row = len(self._rows) // _COLUMNS
        self._rows.frombytes(told.rows)
        self._ended_ns = told.ended_ns
        if told.makeups and row + told.makeups[0].first_row == 0:
            self._makeups.clear()
        self._marks += [[row + at, *values] for at, *values in told.marks]
        self._pools += [[row + at, *values] for at, *values in told.pools]
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
        steps = Steps.uncosted(len(rows), self._makeups, self._others + self._graphs(len(rows)))
        known = dict(zip(STEP_ROW, rows.T, strict=True))
        known |= self._marked(known, steps.sequences) | self._pooled(steps.sequences)
        self._fill(steps, known)
        last = self._makeups[-1]
        later = len(rows) - last.first_row
        self._makeups = [replace(last, first_row=0, past_tokens=[past + later for past in last.past_tokens])]
        self._rows, self._marks, self._pools = array("q"), [], []
        self._others, self._carried, self._forgotten = [], [], []
        return steps

    def _graphs(self, count: int) -> Others:
        """Those of the steps without a mark: what the step before ran as."""
        told = {row: graph for row, field, graph in self._others if field == "graph"}
        ends = [mark[0] for mark in self._marks[1:]] + [count]
        return [
            (row, "graph", told[mark[0]])
            for mark, end in zip(self._marks, ends, strict=True)
            if mark[0] in told
            for row in range(mark[0] + 1, end)
        ]

    def _marked(self, known: _Columns, sequences: np.ndarray) -> _Columns:
        """The columns of STEP_MARK. A step without a mark is the one before once more."""
        marks = dict(zip(STEP_MARK, np.array(self._marks, np.int64).T, strict=True))
        rows = np.arange(len(sequences))
        place = np.searchsorted(marks["row"], rows, "right") - 1  # of the mark that stands for each row
        columns = {name: marks[name][place] for name in _STANDING}
        columns |= {name: np.zeros(len(rows), np.int64) for name in _OF_ONE}
        columns["step"] = marks["step"][place] + rows - marks["row"][place]
        columns["emitted_tokens"] = sequences.copy()
        columns["idle_since_ns"] = np.roll(known["device_end_ns"], 1)
        columns["ended_before_ns"] = known[f"{STAGES[0]}_began_ns"].copy()
        for name in ("emitted_tokens", "idle_since_ns", "ended_before_ns", *_OF_ONE):
            columns[name][marks["row"]] = marks[name]
        return columns

    def _pooled(self, sequences: np.ndarray) -> _Columns:
        """The columns of POOL_MARK."""
        pools = dict(zip(POOL_MARK, np.array(self._pools, np.int64).T, strict=True))
        place = np.searchsorted(pools["row"], np.arange(len(sequences)), "right") - 1
        columns = {name: pools[name][place] for name in (*_BLOCKS, "evicted_so_far")}
        written = np.concatenate(([0], np.cumsum(sequences)))  # before each row, had each written a slot of each
        columns["slots_written"] = (pools["slots_written"] - written[pools["row"] + 1])[place] + written[1:]
        return columns

    def _fill(self, steps: Steps, known: _Columns) -> None:
        """The columns of NUMBERS."""
        end_ns = np.append(known["ended_before_ns"][1:], self._ended_ns)
        bounds = np.stack([*(known[f"{stage}_began_ns"] for stage in STAGES), end_ns])
        steps.stages[:] = np.diff(bounds, axis=0)
        begin_ns, forgotten = bounds[0].copy(), np.zeros(len(end_ns), np.int64)
        for row, began_ns, stages in self._carried:
            begin_ns[row] = began_ns
            steps.stages[:, row] += stages
        for row, blocks in self._forgotten:
            forgotten[row] += blocks
        evicted = known["evicted_so_far"]
        worked_out = {
            "begin_ns": begin_ns,
            "end_ns": end_ns,
            "device_ns": known["device_end_ns"] - known["device_begin_ns"],
            "gap_ns": known["device_begin_ns"] - known["idle_since_ns"],
            "evicted_blocks": np.diff(evicted, prepend=self._evicted),
            "forgotten_blocks": forgotten,
        }
        self._evicted = int(evicted[-1])
        for name in NUMBERS:
            if not name.startswith("stage_"):
                steps[name][:] = worked_out[name] if name in worked_out else known[name]
