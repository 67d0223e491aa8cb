"""The front's side of steps: their rows, as messages tell them, until somebody takes them as columns."""

from array import array

import numpy as np
from msgspec.structs import replace

from engine.messages import STEP_ROW, Beside, Outputs
from metrics.records import STAGES
from metrics.step_batch import NUMBERS, Makeup, Others, Steps

# So long are steps kept to be worked out together: what that takes hardly depends on how many they are, and meanwhile
# the front writes no token.
HOLD_NS = 5_000_000_000
AT_ONCE = 64  # messages: for one alone, code and rows have to be fetched from memory

# A step as it is kept: its row, and what its message tells anyhow.
_KEPT = (
    *STEP_ROW, "blocks_free", "blocks_active", "blocks_reusable", "blocks_pinned", "step", "emitted_tokens",
    "committed_ns",
)  # fmt: skip
_BEGAN = [_KEPT.index(f"{stage}_began_ns") for stage in STAGES[:-1]]


class StepRows:
    """The steps of one core. The last one is open: when it ended is told by the message after its own."""

    def __init__(self, hold_ns: int = HOLD_NS):
        self._hold_ns = hold_ns
        self._due_ns = 0  # when those that are kept are
        self._rows = array("q")  # one after the other; numbers lie in it, where a list would keep an object for each
        self._ends = array("q")
        self._makeups: list[Makeup] = []  # the first is that of the first row, or would be if it brought none
        self._others: Others = []
        self._carried: list[tuple[int, int, list[int]]] = []  # row, begin and stages of turns before its own
        self._forgotten: list[tuple[int, int]] = []  # row, blocks
        self._evicted = 0  # before the first row
        self._is_open = False
        # Not taken in yet: of each message its row, what is beside it, `step_ended_ns`, and what is kept with the row.
        self._fresh: list[tuple[bytes, Beside | None, int, tuple[int, ...]]] = []

    def take_in(self, message: Outputs) -> bool:
        """The messages of a core, in their order. Returns whether some steps may be due."""
        committed_ns = message.committed_ns
        more = (*message.blocks, message.next_step - 1, len(message.outputs), committed_ns)
        # The messages are not kept: their memory, which the caches hold, is that of the next ones.
        self._fresh.append((message.row, message.beside, message.step_ended_ns, more))
        if len(self._fresh) < AT_ONCE and committed_ns < self._due_ns:
            return False
        self._absorb()
        return committed_ns >= self._due_ns

    @property
    def is_open(self) -> bool:
        self._absorb()
        return self._is_open

    def close(self) -> None:
        """Nobody will tell when the last step ended: with its commit, which stands last in its row."""
        if self.is_open:
            self._ends.append(self._rows[-1])
            self._is_open = False

    def take(self, now_ns: int | None = None) -> Steps | None:
        """Those that are over and were not taken yet, if they are due by then; without a time at once. None: none.
        What they cost is to be worked out."""
        self._absorb()
        count = len(self._ends)
        if not count or (now_ns is not None and now_ns < self._due_ns):
            return None
        rows = np.array(self._rows, np.int64).reshape(-1, len(_KEPT))
        makeups = [makeup for makeup in self._makeups if makeup.first_row < count]
        steps = Steps.uncosted(count, makeups, [other for other in self._others if other[0] < count])
        self._fill(steps, dict(zip(_KEPT, rows[:count].T, strict=True)), rows[:count])
        self._keep_from(count)
        return steps

    def _absorb(self) -> None:
        """Takes in what came lately."""
        rows, ends = self._rows, self._ends
        for row, beside, ended_ns, more in self._fresh:
            if self._is_open:
                if beside is not None and not row:
                    self._note_late(len(ends), beside)
                ends.append(ended_ns)
                self._is_open = False
            if row:
                if beside is not None:
                    self._note(len(ends), beside)
                if not rows:
                    self._due_ns = more[-1] + self._hold_ns
                rows.frombytes(row)
                rows.extend(more)
                self._is_open = True
        self._fresh.clear()

    def _note(self, row: int, beside: Beside) -> None:
        if beside.makeup is not None:
            if not row:
                self._makeups.clear()
            self._makeups.append(replace(beside.makeup, first_row=row))
        self._others += [(row, field, value) for _, field, value in beside.others]
        if beside.carried is not None:
            self._carried.append((row, *beside.carried))
        if beside.forgotten_blocks:
            self._forgotten.append((row, beside.forgotten_blocks))

    def _note_late(self, row: int, beside: Beside) -> None:
        """More of a step that was told before: times of blocks."""
        for _, field, times in beside.others:
            place = len(self._others) - 1
            while place >= 0 and self._others[place][0] == row and self._others[place][1] != field:
                place -= 1
            if place < 0 or self._others[place][0] != row:
                self._others.append((row, field, times))
            else:
                self._others[place] = (row, field, [*self._others[place][2], *times])
        if beside.forgotten_blocks:
            self._forgotten.append((row, beside.forgotten_blocks))

    def _fill(self, steps: Steps, known: dict[str, np.ndarray], rows: np.ndarray) -> None:
        """The columns of NUMBERS, from [steps, _KEPT]."""
        ends = np.array(self._ends, np.int64)
        bounds = np.column_stack([rows[:, _BEGAN], known["committed_ns"], ends])
        steps.stages[:] = np.diff(bounds, axis=1).T
        begin_ns = known[f"{STAGES[0]}_began_ns"].copy()
        forgotten = np.zeros(len(ends), np.int64)
        for row, began_ns, stages in self._carried:
            if row < len(ends):
                begin_ns[row] = began_ns
                steps.stages[:, row] += stages
        for row, blocks in self._forgotten:
            if row < len(ends):
                forgotten[row] += blocks
        evicted = known["evicted_so_far"]
        worked_out = {
            "begin_ns": begin_ns,
            "end_ns": ends,
            "device_ns": known["device_end_ns"] - known["device_begin_ns"],
            "gap_ns": known["device_begin_ns"] - known["idle_since_ns"],
            "evicted_blocks": np.diff(evicted, prepend=self._evicted),
            "forgotten_blocks": forgotten,
        }
        self._evicted = int(evicted[-1])
        for name in NUMBERS:
            if not name.startswith("stage_"):
                steps[name][:] = worked_out[name] if name in worked_out else known[name]

    def _keep_from(self, count: int) -> None:
        """Forgets what was taken. Of the makeups it keeps what the last one would be by then."""
        last = self._makeups[-1]  # of the open row, or the one before
        later = count - last.first_row
        self._makeups = [replace(last, first_row=0, past_tokens=[past + later for past in last.past_tokens])]
        self._rows, self._ends = self._rows[count * len(_KEPT) :], array("q")
        self._others = [(row - count, field, value) for row, field, value in self._others if row >= count]
        self._carried = [(row - count, *rest) for row, *rest in self._carried if row >= count]
        self._forgotten = [(row - count, blocks) for row, blocks in self._forgotten if row >= count]
        if self._rows:
            self._due_ns = self._rows[-1] + self._hold_ns
