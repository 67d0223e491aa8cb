"""How much two runs of one setting differ: by repeats beside the run, else by other runs of the same model here, else
by what is usual.

A prediction is made from one run, and held against another. So its error has the spread of both.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.compare.settings import identity
from sojourn.metrics.errors import SojournError
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.metrics.statistics.intervals import student
from sojourn.replay.outcome import figures, recorded_answers
from sojourn.replay.simulate import Material
from sojourn.replay.verdict.verify import changed_settings

BLOCK_NS = 1e9  # of the run, for the bootstrap of its own unsteadiness
USUAL_SPEED_SPREAD = 0.03  # of a run on a machine that nobody else uses: docs/results/replay_accuracy.md measures it
OF_TWO_RUNS = math.sqrt(2)
NORMAL_80 = 1.2816  # standard deviations between the median and the bounds of 80 %
LEAST_ERROR_BEYOND = 0.05  # of the time of sizes that only other runs had
USUAL_ERROR_BEYOND = 0.15  # of the time of sizes of which nothing is known
MOST_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations, relative where nothing else is said."""

    speed: float  # of the machine between two runs, with the error of the step model
    repeats: int  # runs that it rests on; 0: none lay beside the run
    error_beyond: float = 0.0  # of the time of steps larger or smaller than those of the run, beside `speed`
    metrics: Mapping[str, float] = field(default_factory=dict)  # figure → of its logarithm; of a share as it is

    @property
    def beyond(self) -> float:
        """Of the time of steps larger or smaller than those of the run, with `speed`."""
        return math.hypot(self.speed, self.error_beyond)

    def of_metric(self, name: str) -> float:
        return self.metrics.get(name, 0.0)


def spread_of(run: RunDirectory, meta: Mapping[str, Any], material: Material, requests: pd.DataFrame) -> Spread:
    repeats = _repeats(run, meta)
    metrics: dict[str, float] = {}
    if repeats:
        found = [_figures(measured(requests, dict(meta)), meta), *repeats]
        for name in found[0]:
            values = np.array([each.get(name, math.nan) for each in found])
            is_share = name.startswith("attainment")
            values = values[~np.isnan(values) & (is_share | (values > 0))]
            if len(values) > 1:
                metrics[name] = _between(values if is_share else np.log(values))
    speed = math.hypot(_speed_spread(material, metrics.get("tpot_ms:p50")), material.times.known_error / 2)
    return Spread(speed=speed, repeats=len(repeats), error_beyond=_error_beyond(material), metrics=metrics)


def _between(values: np.ndarray) -> float:
    """Two runs differ by so much, from what a few did."""
    return OF_TWO_RUNS * student(len(values), NORMAL_80) * float(values.std(ddof=1))


def _speed_spread(material: Material, between_repeats: float | None) -> float:
    """Of the speed of two runs, never below the unsteadiness within one."""
    known = material.known.speed_spread if material.known is not None else None
    if between_repeats is None:
        between_repeats = OF_TWO_RUNS * max(USUAL_SPEED_SPREAD, known or 0.0)
    return max(between_repeats, OF_TWO_RUNS * _within(material))


def _error_beyond(material: Material) -> float:
    """Of the time of sizes beyond those of the run: never below that of sizes between them."""
    known, error = material.known, material.times.error
    if known is None or not known.tells_beyond:
        return max(USUAL_ERROR_BEYOND, error) if math.isfinite(error) else USUAL_ERROR_BEYOND
    return USUAL_ERROR_BEYOND / 2 if known.error is None else max(LEAST_ERROR_BEYOND, known.error)


def _within(material: Material) -> float:
    """What the run's own unsteadiness says of its mean: by blocks of a second."""
    times, begins = material.times, material.step_begins_ns
    block = (begins // BLOCK_NS).astype(int)
    measured_ns = np.bincount(block, weights=times.device_ratio * times.predicted_ns)
    expected_ns = np.bincount(block, weights=times.predicted_ns)
    used = expected_ns > 0
    if used.sum() < 3:
        return USUAL_SPEED_SPREAD
    ratios = np.log(measured_ns[used] / expected_ns[used])
    return float(ratios.std(ddof=1) / math.sqrt(used.sum()))


def _repeats(run: RunDirectory, meta: Mapping[str, Any]) -> list[dict[str, float]]:
    """The figures of other runs in the folder of this one, of the same scenario, seed and settings, and machine."""
    found: list[dict[str, float]] = []
    for file in sorted(Path(run.path).resolve().parent.glob("*/run.json"))[:200]:
        if file.parent == run.path.resolve() or len(found) >= MOST_REPEATS:
            continue
        try:
            other = RunDirectory.open(file.parent)
            other_meta = other.meta()
            if _is_repeat(meta, other_meta):
                found.append(_figures(measured(other.requests(), other_meta), other_meta))
        except (SojournError, OSError, KeyError, ValueError):  # another run that cannot be read tells nothing
            continue
    return found


def _is_repeat(meta: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Of one scenario, seed and settings, on one machine; a run that is not valid repeats nothing."""
    same = meta.get("seed") == other.get("seed") and identity(dict(meta)) == identity(dict(other))
    same = same and _described(meta) == _described(other)
    return same and other.get("valid") is not False and not changed_settings(meta, other)


def _described(meta: Mapping[str, Any]) -> dict[str, Any]:
    """A scenario with its description: a planted network or neighbour is in no setting, but its case says so."""
    return {name: value for name, value in section(meta, "scenario").items() if name not in ("name", "engine")}


def _figures(rows: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, float]:
    return figures(recorded_answers(rows), meta.get("objectives"), None)
