"""Whether loading a prefix is cheaper than computing it again, by measured speeds."""

from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from sojourn.metrics.memory.kv_load import NOTHING_LOADED, KVLoad

WEIGHT = 0.2  # of the newest measurement
LEAST_TOKENS = 16  # of a step's prompts: smaller steps say little of the speed of a long prompt


@dataclass(slots=True)
class Speed:
    """Amounts per nanosecond, as an exponential mean."""

    per_ns: float | None = None

    def observe(self, amount: float, ns: int) -> None:
        if amount <= 0 or ns <= 0:
            return
        measured = amount / ns
        self.per_ns = measured if self.per_ns is None else (1 - WEIGHT) * self.per_ns + WEIGHT * measured

    def ns(self, amount: float) -> int | None:
        """How long `amount` will take; None while nothing was measured."""
        return None if self.per_ns is None else round(amount / self.per_ns)


class Choice(NamedTuple):
    """What is cheaper, and the two predictions in nanoseconds. None: nothing is known, and loading is tried."""

    loads: bool
    load_ns: int | None
    recompute_ns: int | None

    def report(self, load: KVLoad = NOTHING_LOADED) -> KVLoad:
        """What the record of a request says of it."""
        decision = "load" if self.loads else "recompute"
        return replace(
            load, load_decision=decision, load_predicted_ns=self.load_ns, recompute_predicted_ns=self.recompute_ns
        )


def choose(load_ns: int | None, recompute_ns: int | None) -> Choice:
    loads = load_ns is None or recompute_ns is None or load_ns <= recompute_ns
    return Choice(loads, load_ns, recompute_ns)
