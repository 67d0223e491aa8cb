"""How much two runs of one setting differ: by repeats beside the run, else by other runs of the same model here, else
by what is usual; and by what disturbed this run.

A prediction is made from one run, and held against another. So its error has the spread of both. Of what wandered
within the run, each replay draws what the other run may have had (replay/noise.py); how well the run itself knows its
mean speed is counted here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from sojourn.metrics.compare.dependence import USUAL_SPEED_SPREAD
from sojourn.metrics.request.goodput import measured
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.statistics.intervals import student
from sojourn.replay.disturbance import NORMAL_80, Disturbance, disturbance_of, wandering_of
from sojourn.replay.outcome import figures, recorded_answers
from sojourn.replay.repeats import repeats_of
from sojourn.replay.simulate import Material
from sojourn.replay.steps_table import under_load

OF_TWO_RUNS = math.sqrt(2)
# Of the logarithm of the slowdown by other processes and machines, between two runs on one machine: chosen on the first
# pairs of docs/results/noisy_pairs.md.
OF_SLOWDOWN = 0.4
LEAST_ERROR_BEYOND = 0.05  # of the time of sizes that only other runs had
USUAL_ERROR_BEYOND = 0.15  # of the time of sizes of which nothing is known


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
    rows = measured(requests, dict(meta))
    repeats = [_figures(each, meta) for each in repeats_of(run, meta, rows)]
    metrics: dict[str, float] = {}
    if repeats:
        found = [_figures(rows, meta), *repeats]
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


def _figures(rows: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, float]:
    return figures(recorded_answers(rows), meta.get("objectives"), None)
