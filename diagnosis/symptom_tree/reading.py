"""One figure of a run that speaks for or against an object of a symptom tree, and the figures that several share.

A reading is None where its evidence is missing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sojourn.diagnosis.facts import Facts
from sojourn.metrics.ledger import ACCOUNT_BY_NAME

# Below a tenth, an account or a reason is not what a user feels: nine tenths of the delay would remain without it.
NEGLIGIBLE = 0.10


@dataclass(frozen=True, slots=True)
class Reading:
    """A measured fact in words. `rules_out`: its size excludes the object; `share` (0 to 1) draws a bar."""

    statement: str
    rules_out: bool
    source: str  # table and columns
    share: float | None = None


Read = Callable[[Facts], Reading | None]


def account(*names: str) -> Read:
    """The share of all requests' time that these accounts hold together, and what they take of a request."""

    def read(facts: Facts) -> Reading | None:
        columns = [f"ledger_{ACCOUNT_BY_NAME[name].column}" for name in names]
        served = facts.rows[facts.rows.status == "ok"]
        booked = served[columns].astype("float64")
        if not booked.notna().any(axis=None):
            return None
        ms = float(booked.mean().sum()) / 1e6
        share = ms / max(float(served.e2e_ms.astype("float64").mean()), 1e-9)
        take = "takes" if len(names) == 1 else "take"
        return Reading(
            f"{' + '.join(names)} {take} {ms:,.1f} ms of a request, {share:.0%} of its latency",
            share < NEGLIGIBLE / 10,
            f"requests: {', '.join(columns)}",
            share,
        )

    return read


def waiting_for(reason: str, what: str) -> Read:
    def read(facts: Facts) -> Reading | None:
        if not facts.joined:
            return None
        share = facts.waits.get(reason, 0.0)
        return Reading(f"{share:.0%} of the waiting was for {what}", share < NEGLIGIBLE, "requests: waits", share)

    return read


def prefix_outcome(*outcomes: str, what: str) -> Read:
    def read(facts: Facts) -> Reading | None:
        if facts.prefix is None:
            return None
        share = sum(facts.prefix.outcomes.get(outcome, 0.0) for outcome in outcomes)
        return Reading(
            f"{share:.0%} of the prompt tokens {what}", share < NEGLIGIBLE, "requests: prefix_outcomes", share
        )

    return read
