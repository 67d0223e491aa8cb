"""One pair: what replays of the base runs said of a setting, and what the runs with it did."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sojourn.metrics.prediction import Change, Interval, Prediction
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.results.load import declared_window_s
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.outcome import figures, recorded_answers
from sojourn.replay.predictor import ReplayPredictor, StepErrors, predictor_of

FIGURES = {"tpot": "tpot_ms:p50", "e2e": "e2e_ms:p50", "ttft": "ttft_ms:p50", "attainment": "attainment"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one figure of one repeat; ms, or a share."""

    base: float
    predicted: float
    low: float
    high: float
    measured: float
    at_its_speed: float  # predicted for a device as fast as that of the changed run
    unchanged_width: float  # of the interval of the run replayed unchanged

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True)
class Figure:
    """Of one figure of a pair, over its repeats."""

    outcomes: Sequence[Outcome]
    relative: bool  # a latency; an attainment is compared by points

    def median(self, name: str) -> float:
        return statistics.median(getattr(each, name) for each in self.outcomes)

    @property
    def error(self) -> float:
        """Relative, or in shares of the requests; the median of the repeats."""
        return statistics.median(self._change(each.measured, each.predicted) for each in self.outcomes)

    @property
    def error_at_its_speed(self) -> float:
        """`error` without what the machine did between the two runs."""
        return statistics.median(self._change(each.measured, each.at_its_speed) for each in self.outcomes)

    @property
    def inside(self) -> int:
        """Repeats whose outcome lies within its interval."""
        return sum(each.is_inside for each in self.outcomes)

    @property
    def spread(self) -> float:
        """Largest minus smallest change among the repeats; of a single one, the width of the interval of the run
        replayed unchanged."""
        if len(self.outcomes) == 1:
            only = self.outcomes[0]
            return only.unchanged_width / only.base if self.relative and only.base else only.unchanged_width
        changes = [self._change(each.base, each.measured) for each in self.outcomes]
        return max(changes) - min(changes)

    @property
    def has_right_sign(self) -> bool | None:
        """None where the change is within the spread of runs."""
        change = statistics.median(self._change(each.base, each.measured) for each in self.outcomes)
        said = statistics.median(self._change(each.base, each.predicted) for each in self.outcomes)
        return None if abs(change) <= self.spread else (change > 0) == (said > 0)

    def _change(self, before: float, after: float) -> float:
        if not self.relative:
            return after - before
        return after / before - 1 if before else math.nan


@dataclass(frozen=True, slots=True)
class Compared:
    workload: str
    settings: dict[str, Any]
    figures: dict[str, Figure]  # by FIGURES
    preemptions: tuple[int, int, int]  # base, predicted, measured
    speed: float  # device time of the changed run against the base's step model, in sizes that both have: 0.1 is slower
    beyond: float  # ... in larger sizes; NaN where there are none
    seconds: float  # of one prediction, with its interval
    doubts: list[str]
    repeats: int


def compare(
    name: str, settings: dict[str, Any], bases: Sequence[RunDirectory], changed: Sequence[RunDirectory]
) -> Compared:
    """Each base predicts the changed run of the same repeat."""
    pairs = list(zip(bases, changed, strict=True))
    begin, change = time.monotonic(), Change(settings=settings)
    ReplayPredictor(bases[0]).predict([change])
    seconds = time.monotonic() - begin
    predicted = [_predicted(base, after, settings) for base, after in pairs]
    figures = {
        key: Figure(
            [
                _outcome(base, after, said, figure)
                for (base, after), said in zip(pairs, predicted, strict=True)
            ],
            relative=key != "attainment",
        )
        for key, figure in FIGURES.items()
    }  # fmt: skip
    preempted = (
        round(statistics.median(_preemptions(run.path) for run in bases)),
        round(statistics.median(said.preemptions for _, said, _ in predicted)),
        round(statistics.median(_preemptions(run.path) for run in changed)),
    )
    steps = [_step_errors(base.path, after.path) for base, after in pairs]
    doubts = sorted({doubt for _, said, _ in predicted for doubt in said.doubts})
    speed, beyond = (statistics.median(getattr(each, part) for each in steps) for part in ("known", "beyond"))
    return Compared(name, settings, figures, preempted, speed, beyond, seconds, doubts, len(pairs))


def _predicted(base: RunDirectory, changed: RunDirectory, settings: dict[str, Any]) -> list[Prediction]:
    """The run unchanged; with the settings; and with them on a machine as fast as it was in the changed run."""
    known = _step_errors(base.path, changed.path).known
    speed = 1.0 if math.isnan(known) else 1 / (1 + known)
    return _predictor(base.path).predict(
        [Change(), Change(settings=settings), Change(settings=settings, device_speed=speed)]
    )


def _outcome(base: RunDirectory, changed: RunDirectory, predicted: Sequence[Prediction], figure: str) -> Outcome:
    unchanged, said, at_its_speed = (_interval(each, figure) for each in predicted)
    return Outcome(
        base=_figures(base.path)[figure],
        predicted=said.median,
        low=said.low,
        high=said.high,
        at_its_speed=at_its_speed.median,
        measured=_figures(changed.path)[figure],
        unchanged_width=unchanged.high - unchanged.low,
    )


@cache
def _predictor(path: Path) -> ReplayPredictor:
    return predictor_of(RunDirectory(path))


def _interval(prediction: Prediction, figure: str) -> Interval:
    name, _, quantile = figure.partition(":")
    return getattr(prediction, name)[quantile] if quantile else getattr(prediction, name)


@cache
def _step_errors(base: Path, changed: Path) -> StepErrors:
    return _predictor(base).step_errors(RunDirectory(changed).table("steps"))


@cache
def _figures(path: Path) -> dict[str, float]:
    run = RunDirectory(path)
    meta = run.meta()
    rows = measured(run.requests(), meta)
    return figures(recorded_answers(rows), meta.get("objectives"), declared_window_s(meta))


@cache
def _preemptions(path: Path) -> int:
    return int(RunDirectory(path).table("steps").preempted_ids.map(len).sum())
