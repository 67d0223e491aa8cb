"""One pair: what replays of the base runs said of a setting, and what the runs with it did."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine.replay.outcome import figures, recorded_answers
from engine.replay.predictor import ReplayPredictor, predictor_of
from metrics.replay.prediction import Change, Prediction
from metrics.request.goodput import measured
from metrics.results.load import declared_window_s
from metrics.run.directory import RunDirectory

FIGURES = {"tpot": "tpot_ms:p50", "e2e": "e2e_ms:p50", "ttft": "ttft_ms:p50", "attainment": "attainment"}


@dataclass(frozen=True, slots=True)
class Figure:
    """Of one figure of a pair; ms, or a share."""

    base: float  # medians over the repeats
    predicted: float
    low: float
    high: float
    measured: float
    spread: float  # largest minus smallest over the repeats of base and change, each relative to its median, mean

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted / self.measured - 1 if self.measured else math.nan

    @property
    def is_inside(self) -> bool:
        return self.low <= self.measured <= self.high

    def has_right_sign(self, relative: bool) -> bool | None:
        """None where the change is within the spread of runs."""
        change, said = self.measured - self.base, self.predicted - self.base
        unit = self.base if relative else 1.0
        return None if abs(change) <= self.spread * unit else (change > 0) == (said > 0)


@dataclass(frozen=True, slots=True)
class Compared:
    workload: str
    settings: dict[str, Any]
    figures: dict[str, Figure]  # by FIGURES
    preemptions: tuple[int, int, int]  # base, predicted, measured
    seconds: float  # of one prediction, with its interval
    doubts: list[str]
    repeats: int


def compare(
    name: str, settings: dict[str, Any], bases: Sequence[RunDirectory], changed: Sequence[RunDirectory]
) -> Compared:  # fmt: skip
    predictions, begin = [_predict(run.path, settings) for run in bases], time.monotonic()
    ReplayPredictor(bases[0]).predict([Change(settings=settings)])  # from the start, as one who asks only that
    seconds = time.monotonic() - begin
    before, after = [_figures(run.path) for run in bases], [_figures(run.path) for run in changed]
    found = {}
    for key, figure in FIGURES.items():
        said = [_interval(each, figure) for each in predictions]
        found[key] = Figure(
            base=statistics.median(each[figure] for each in before),
            predicted=statistics.median(each.median for each in said),
            low=statistics.median(each.low for each in said),
            high=statistics.median(each.high for each in said),
            measured=statistics.median(each[figure] for each in after),
            spread=statistics.mean(_spread([each[figure] for each in runs], key) for runs in (before, after)),
        )
    preempted = (
        round(statistics.median(_preemptions(run.path) for run in bases)),
        round(statistics.median(each.preemptions for each in predictions)),
        round(statistics.median(_preemptions(run.path) for run in changed)),
    )
    doubts = sorted({doubt for each in predictions for doubt in each.doubts})
    return Compared(name, settings, found, preempted, seconds, doubts, min(len(bases), len(changed)))


@cache
def _predictor(path: Path) -> ReplayPredictor:
    return predictor_of(RunDirectory(path))


def _predict(path: Path, settings: dict[str, Any]) -> Prediction:
    return _predictor(path).predict([Change(settings=settings)])[0]


def _interval(prediction: Prediction, figure: str):
    name, _, quantile = figure.partition(":")
    return getattr(prediction, name)[quantile] if quantile else getattr(prediction, name)


@cache
def _figures(path: Path) -> dict[str, float]:
    run = RunDirectory(path)
    meta = run.meta()
    rows = measured(run.requests(), meta)
    return figures(recorded_answers(rows), meta.get("objectives"), declared_window_s(meta))


@cache
def _preemptions(path: Path) -> int:
    return int(RunDirectory(path).table("steps").preempted_ids.map(len).sum())


def _spread(values: Sequence[float], key: str) -> float:
    width = max(values) - min(values)
    return width if key == "attainment" else width / statistics.median(values)
