"""What was different between two runs beside their settings: the machine's speed, its neighbours, and the arrivals."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec
import pandas as pd

from sojourn.metrics.compare.samples import read_run, same_schedule
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.server_alone import requests_of
from sojourn.replay.disturbance import Disturbance, disturbance_of
from sojourn.replay.predictor import ReplayPredictor
from sojourn.replay.settings import SPEED
from sojourn.replay.steps_table import under_load
from sojourn.replay.verdict.changed import changed_settings

WORTH_NAMING = 0.05  # of the speed, and of the time that others took
LATE_MS = 5.0  # of sending, p90


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a prediction does not know of the second run."""

    name: str  # speed, neighbours, steal, clock, arrivals, sending
    before: float | None  # a share, ms, or times as long; None where the run does not tell
    after: float | None
    sentence: str
    is_different: bool


def differences(run: RunDirectory, run2: RunDirectory, predictor: ReplayPredictor | None) -> list[Difference]:
    """Everything that both runs tell, also what was alike."""
    rows, steps = zip(*((requests_of(each, each.meta()), loaded(each)) for each in (run, run2)), strict=True)
    found = []
    if predictor is not None and not math.isnan(longer := predictor.step_errors(steps[1]).known):
        word = f"{1 + longer:.2f} times as long" if abs(longer) >= WORTH_NAMING else "as long"
        own = [name for name in changed_settings(run.meta(), run2.meta()) if name in SPEED]
        cause = f"; it had other settings that change the speed: {', '.join(own)}" if own else ""
        found.append(
            Difference(
                name="speed", before=1.0, after=1 + longer, is_different=abs(longer) >= WORTH_NAMING,
                sentence=f"steps of equal size took {word} in {run2.name}{cause}",
            )
        )  # fmt: skip
    first, second = (
        disturbance_of(each.meta(), each.table("system"), its) for each, its in zip((run, run2), steps, strict=True)
    )
    found += _machine(first, second)
    if not same_schedule(read_run(run), read_run(run2)):
        found.append(
            Difference(
                name="arrivals", before=None, after=None, is_different=True,
                sentence="the requests were not the same, or not due at the same moments, despite one seed",
            )
        )  # fmt: skip
    lag, lag2 = (_lag_ms(each) for each in rows)
    if lag is not None and lag2 is not None and max(lag, lag2) >= LATE_MS:
        found.append(
            Difference(
                name="sending", before=lag, after=lag2, is_different=abs(lag2 - lag) >= LATE_MS,
                sentence=f"requests were sent late by {lag:.1f} ms, then {lag2:.1f} ms (p90)",
            )
        )  # fmt: skip
    return found


def loaded(run: RunDirectory) -> pd.DataFrame:
    """The steps of a run under load."""
    return under_load(run.table("steps"), requests_of(run, run.meta()))


def _machine(first: Disturbance, second: Disturbance) -> list[Difference]:
    names = _named(first.neighbours | second.neighbours)
    sentences = {
        "neighbours": ("waiting", f"of the time the core's threads waited for a CPU that other processes had{names}"),
        "steal": ("stolen", "of the CPU time the hypervisor gave to other machines"),
        "clock": ("clock", "was the standard deviation of the device's clock"),
    }
    found = []
    for name, (part, sentence) in sentences.items():
        before, after = getattr(first, part), getattr(second, part)
        if before is None or after is None or max(before, after) < WORTH_NAMING / 5:
            continue
        is_different = abs(after - before) >= WORTH_NAMING
        shares = f"{before:.0%}, then {after:.0%}" if is_different else f"{after:.0%}"
        found.append(
            Difference(
                name=name, before=before, after=after, sentence=f"{shares} {sentence}", is_different=is_different
            )
        )
    return found


def _named(neighbours: Mapping[str, Any]) -> str:
    return f" ({', '.join(list(neighbours)[:3])})" if neighbours else ""


def _lag_ms(rows: pd.DataFrame) -> float | None:
    lag = (rows.sent_ns - rows.due_ns).dropna().astype("float64")
    return float(lag.quantile(0.9)) / 1e6 if len(lag) else None
