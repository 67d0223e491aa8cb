"""How much two runs of one setting differ: by repeats beside the run, else by other runs of the same model here, else
by what is usual; and by what disturbed this run.

A prediction is made from one run, and held against another. So its error has the spread of both. Of what wandered
within the run, each replay draws what the other run may have had (replay/noise.py); how well the run itself knows its
mean speed is counted here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.compare.pairs import USUAL_SPEED_SPREAD
from sojourn.metrics.compare.settings import identity
from sojourn.metrics.errors import SojournError
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.metrics.statistics.intervals import student
from sojourn.replay.disturbance import NORMAL_80, Disturbance, disturbance_of, wandering_of
from sojourn.replay.material import under_load
from sojourn.replay.outcome import figures, recorded_answers
from sojourn.replay.simulate import Material
from sojourn.replay.verdict.changed import changed_settings

OF_TWO_RUNS = math.sqrt(2)
# Of the logarithm of the slowdown by other processes and machines, between two runs on one machine: chosen on the first
# pairs of docs/results/noisy_pairs.md.
OF_SLOWDOWN = 0.4
LEAST_ERROR_BEYOND = 0.05  # of the time of sizes that only other runs had
USUAL_ERROR_BEYOND = 0.15  # of the time of sizes of which nothing is known
MOST_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations, relative where nothing else is said."""

    speed: float  # of the machine between two runs, with the error of the step model
    repeats: int  # runs that it rests on; 0: none lay beside the run
    disturbance: Disturbance = field(default_factory=Disturbance)  # of the run
    error_beyond: float = 0.0  # of the time of steps larger or smaller than those of the run, beside `speed`
    metrics: Mapping[str, float] = field(default_factory=dict)  # figure → of its logarithm; of a share as it is

    @property
    def beyond(self) -> float:
        """Of the time of steps larger or smaller than those of the run, with `speed`."""
        return math.hypot(self.speed, self.error_beyond)

    def of_metric(self, name: str) -> float:
        return self.metrics.get(name, 0.0)


def spread_of(
    run: RunDirectory, meta: Mapping[str, Any], material: Material, requests: pd.DataFrame, server: RunDirectory
) -> Spread:
    """`server` has the steps of `material`: the run itself, or one of a fleet's."""
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
    disturbance = disturbance_of(
        server.meta(),
        server.table("system"),
        under_load(server.table("steps"), requests),
        wandering_of(material.times, material.step_begins_ns),
    )
    speed = math.hypot(
        _between_runs(material, metrics.get("tpot_ms:p50")), disturbance.wandering,
        OF_SLOWDOWN * disturbance.slowdown, material.times.known_error / 2,
    )  # fmt: skip
    return Spread(
        speed=speed, repeats=len(repeats), disturbance=disturbance, error_beyond=_error_beyond(material),
        metrics=metrics,
    )  # fmt: skip


def _between(values: np.ndarray) -> float:
    """Two runs differ by so much, from what a few did."""
    return OF_TWO_RUNS * student(len(values), NORMAL_80) * float(values.std(ddof=1))


def _between_runs(material: Material, between_repeats: float | None) -> float:
    """Of the speed of two runs that nothing disturbs."""
    known = material.known.speed_spread if material.known is not None else None
    if between_repeats is None:
        between_repeats = OF_TWO_RUNS * max(USUAL_SPEED_SPREAD, known or 0.0)
    return between_repeats


def _error_beyond(material: Material) -> float:
    """Of the time of sizes beyond those of the run: never below that of sizes between them."""
    known, error = material.known, material.times.error
    if known is None or not known.tells_beyond:
        return max(USUAL_ERROR_BEYOND, error) if math.isfinite(error) else USUAL_ERROR_BEYOND
    return USUAL_ERROR_BEYOND / 2 if known.error is None else max(LEAST_ERROR_BEYOND, known.error)


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
