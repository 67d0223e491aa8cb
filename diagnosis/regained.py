"""What a change regains: attainment, or where it regains none, which objectives it would meet and which it would not.

A change that brings no request within all of its objectives is not called a fix. It may still be a step: it meets one
objective, and another one is still missed.
"""

from collections.abc import Mapping

from sojourn.diagnosis.evidence import Client, tightest
from sojourn.diagnosis.excess import attainment, rows_without
from sojourn.metrics.prediction import Prediction, attainment_text
from sojourn.metrics.request.objectives import OBJECTIVES, short

ALL_MEET = 0.9  # of the requests: an objective that so many keep is met


def regains(now: float, then: float) -> bool:
    """Whether an attainment rises by as much as a reader is shown. Shares, 0 to 1."""
    return round(100 * then) > round(100 * now)


def estimate(facts: Client, claims: Mapping[str, float]) -> tuple[str, float, bool]:
    """What is gained with these shares of the accounts gone: in words, as a share of the sent requests, and whether
    any request is."""
    then = rows_without(facts, claims)
    now, after = attainment(facts), float(then.good.mean()) if len(then) else 0.0
    if regains(now, after):
        return f"attainment {now:.0%} → about {after:.0%}", after - now, True
    shares = {name: float(then[f"{short(name)}_met"].dropna().astype("float64").mean()) for name in OBJECTIVES}
    met = {name: share >= ALL_MEET for name, share in shares.items() if share == share}
    return _tell_nothing(facts, now, met), after - now, False


def tell_replay(facts: Client, prediction: Prediction, unchanged: Prediction | None) -> tuple[str, bool]:
    """What a replay gives in words, and whether it regains a request: more than were measured, and than the run
    replayed unchanged has."""
    now, then = attainment(facts), prediction.attainment.median
    if prediction.is_open:
        return f"attainment {now:.0%} → {attainment_text(prediction)}", True
    if regains(now, then) and (unchanged is None or regains(unchanged.attainment.median, then)):
        return f"attainment {now:.0%} → {attainment_text(prediction)}", True
    quantiles = {"ttft_ms": prediction.ttft_ms, "tpot_ms": prediction.tpot_ms, "e2e_ms": prediction.e2e_ms}
    met = {
        name: each["p90"].median <= tightest(facts, name)
        for name, each in quantiles.items()
        if "p90" in each and tightest(facts, name) is not None and each["p90"].median == each["p90"].median
    }
    return _tell_nothing(facts, now, met), False


def _tell_nothing(facts: Client, now: float, met: Mapping[str, bool]) -> str:
    """Which objectives a change would meet and which not, where it regains no request."""
    named = [name for name in met if tightest(facts, name) is not None]
    would = [short(name).upper() for name in named if met[name]]
    still = [short(name).upper() for name in named if not met[name]]
    said = f"alone it regains no request: attainment stays at {now:.0%}"
    parts = [f"{_and(would)} would be met" if would else "", f"{_and(still)} still missed" if still else ""]
    return f"{said}; {', '.join(filter(None, parts))}" if still else said


def _and(names: list[str]) -> str:
    return " and ".join(names)
