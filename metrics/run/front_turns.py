"""Time in which a request stood in the server's socket because the front's event loop was busy.

A client stamps its send, and the front stamps the arrival when its loop reads the request. Between the two are the
network and the loop. The front records the turns of its loop that took long (table `system`, columns loop_turn_*): what
overlaps with them is no transit.
"""

from typing import TYPE_CHECKING

import numpy as np

from sojourn.metrics.ledger import ACCOUNT_BY_NAME

if TYPE_CHECKING:
    import pandas as pd

FROM, TO = (ACCOUNT_BY_NAME[name].column for name in ("client.network", "request.admission"))


class Turns:
    """Stretches of time in their order, none of which overlap: such as the long turns of one event loop."""

    def __init__(self, begin_ns: np.ndarray, lasted_ns: np.ndarray):
        order = np.argsort(begin_ns, kind="stable")
        self.begin_ns, self.lasted_ns = begin_ns[order], lasted_ns[order]
        self.end_ns = self.begin_ns + self.lasted_ns

    @classmethod
    def of(cls, system: "pd.DataFrame") -> "Turns":
        """From rows of the table `system`."""
        return cls(*(_joined(system, name) for name in ("loop_turn_begin_ns", "loop_turn_ns")))

    def __len__(self) -> int:
        return len(self.begin_ns)

    def within(self, begin_ns: np.ndarray, end_ns: np.ndarray) -> np.ndarray:
        """Nanoseconds of turns between each begin and its end, float64; NaN where either is."""
        if not len(self):
            return np.where(np.isnan(begin_ns) | np.isnan(end_ns), np.nan, 0.0)
        return self._before(end_ns) - self._before(begin_ns)

    def _before(self, ns: np.ndarray) -> np.ndarray:
        """Nanoseconds of turns before a moment. float64 has 2^53 of them exactly: 104 days of a monotonic clock."""
        corners = np.column_stack([self.begin_ns, self.end_ns]).ravel()
        spent = np.concatenate([[0.0], np.cumsum(self.lasted_ns)])
        return np.interp(ns, corners, np.repeat(spent, 2)[1:-1])


def with_front_turns(joined: "pd.DataFrame", system: "pd.DataFrame") -> "pd.DataFrame":
    """Moves from `client.network` to `request.admission` what a request waited for turns of the front's loop between
    its send and its arrival, as `front_turns_ns`; 0 without such records. The sum of the accounts stays."""
    sent, arrived = (joined[name].astype("float64").to_numpy(dtype="float64", na_value=np.nan)
                     for name in ("sent_ns", "arrived_ns"))  # fmt: skip
    waited = Turns.of(system).within(sent, np.maximum(arrived, sent))
    joined["front_turns_ns"] = waited
    moved = np.nan_to_num(waited)
    for prefix in ("ledger", "ttft") if moved.any() else ():
        for column, sign in ((FROM, -1), (TO, 1)):
            name = f"{prefix}_{column}"
            joined[name] = joined[name].astype("float64") + sign * moved
    return joined


def _joined(system: "pd.DataFrame", name: str) -> np.ndarray:
    """A column of lists as one array."""
    lists = [cell for cell in system[name] if cell is not None and not isinstance(cell, float)]
    return np.concatenate([np.zeros(0), *(np.asarray(cell, dtype="float64") for cell in lists)])
