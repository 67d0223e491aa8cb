"""What the lateness of the load generator could change: a run that is not valid is diagnosed all the same.

Every request is judged twice more: as if it had been sent on time, and as if the generator's lateness had come on top
once more. A verdict is safe if it is the same both times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import pandas as pd

from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import SERVED, Excess, excesses
from sojourn.diagnosis.symptoms import TOLERATED_MISSES, significant
from sojourn.diagnosis.verdict import Finding
from sojourn.metrics.records import NO_END
from sojourn.metrics.request.goodput import judged
from sojourn.metrics.request.objectives import short

FROM_SEND = ("ttft_ms", "e2e_ms")  # the latencies that begin when a request was due


@dataclass(frozen=True, slots=True)
class Lateness:
    """Which objectives of which classes are in doubt, and why no verdict is possible at all."""

    in_doubt: dict[tuple[str, str], str]  # with the sentence that says why
    reasons: list[str]  # why run.json calls the run invalid
    no_verdict: str = ""  # why nothing can be said
    cut_short: bool = False  # the load or the server ended early: what was not sent might have been late

    @property
    def unsafe(self) -> list[str]:
        return list(self.in_doubt.values())


def lateness(facts: Client, lost: Sequence[Excess]) -> Lateness:
    """Judges again with the generator's lateness taken off, and added once more."""
    reasons = [str(reason) for reason in facts.meta.get("invalid_reasons") or ()]
    invalid = facts.meta.get("valid") is False and bool(facts.sent or reasons)
    if invalid and not reasons:
        reasons = ["run.json gives no reason"]
    if not facts.sent:
        return Lateness({}, reasons if invalid else [], "nothing was measured" if invalid else "")
    lag_ms = (
        ((facts.rows.sent_ns.astype("float64") - facts.rows.due_ns.astype("float64")) / 1e6).clip(lower=0).fillna(0)
    )
    unsent = facts.errors.get(NO_END, 0) / facts.sent
    no_verdict = ""
    if invalid and unsent > TOLERATED_MISSES:
        no_verdict = f"{unsent:.0%} of the requests were never sent, or have no recorded end"
    ended_early = invalid and bool(facts.meta.get("load_reasons", reasons))
    return Lateness(_doubts(facts, lost, lag_ms), reasons if invalid else [], no_verdict, ended_early)


def _doubts(facts: Client, lost: Sequence[Excess], lag_ms: pd.Series) -> dict[tuple[str, str], str]:
    here = {(each.klass, each.objective) for each in lost if each.objective != SERVED}
    in_doubt: dict[tuple[str, str], str] = {}
    for sign, words in ((-1, "had all requests been sent on time"), (1, "had they been sent later still")):
        other = _sent_otherwise(facts, sign * lag_ms)
        there = {(each.klass, each.objective) for each in excesses(other) if significant(other, each)}
        for klass, objective in sorted(here ^ there):
            whom = f" of {klass}" if klass else ""
            in_doubt[klass, objective] = (
                f"unsafe: {words}, {_missing(other, klass, objective):.0%}{whom} would miss their {short(objective)} "
                f"objective, and {_missing(facts, klass, objective):.0%} do"
            )
    return in_doubt


def mark(found: Finding, late: Lateness) -> Finding:
    """The finding with the reason for which it is not safe."""
    hit = [sentence for name, sentence in late.in_doubt.items() if _is_of(found, name)]
    return msgspec.structs.replace(found, unsafe=hit[0]) if hit else found


def _is_of(found: Finding, name: tuple[str, str]) -> bool:
    klass, objective = name
    return found.objective.startswith(short(objective)) and found.objective.endswith(f"for {klass}" if klass else "ms")


def _sent_otherwise(facts: Client, added_ms: pd.Series) -> Client:
    rows = facts.rows.copy()
    for objective in FROM_SEND:
        rows[objective] = rows[objective].astype("float64") + added_ms
    return replace(facts, rows=judged(rows, facts.objectives))


def _missing(facts: Client, klass: str, objective: str) -> float:
    """Of the requests of a class that an objective judges, those that miss it."""
    met = facts.rows[facts.rows.klass == klass][f"{short(objective)}_met"].dropna()
    return 1.0 - float(met.mean()) if len(met) else 0.0
