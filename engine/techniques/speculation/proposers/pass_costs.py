"""What the passes of a proposer cost: their exact FLOPs, and the bytes that they must move at least."""

from collections.abc import Sequence

import numpy as np

from sojourn.metrics.compute.cost_model import ModelShape, step_cost, steps_work


class PassCosts:
    """Of one call of a proposer. The passes are counted together, at its end."""

    def __init__(self, shape: ModelShape, other_flops: int = 0):
        self._shape, self._other_flops = shape, other_flops
        self._new: list[np.ndarray] = []
        self._past: list[np.ndarray] = []
        self._logit_rows: list[int] = []

    def add(self, new: Sequence[int] | np.ndarray, past: Sequence[int] | np.ndarray, logit_rows: int) -> None:
        """A pass: `new` tokens of each sequence behind `past` ones."""
        self._new.append(np.asarray(new, dtype=np.int64))
        self._past.append(np.asarray(past, dtype=np.int64))
        self._logit_rows.append(logit_rows)

    def total(self) -> tuple[int, int]:
        """FLOPs and bytes."""
        if not self._new:
            return self._other_flops, 0
        sequences = np.array([len(new) for new in self._new])
        rows = np.array(self._logit_rows)
        work = steps_work(self._shape, np.concatenate(self._new), np.concatenate(self._past), sequences, rows)
        cost = step_cost(self._shape, work)
        return int(np.sum(cost.flops)) + self._other_flops, int(np.sum(cost.moved_bytes))
