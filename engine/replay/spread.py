"""How much two runs of one setting differ: from repeats beside the run, else from what runs usually differ by."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from engine.replay.outcome import figures, recorded_answers
from engine.replay.simulate import Material
from metrics.errors import SojournError
from metrics.request.goodput import measured
from metrics.run.directory import RunDirectory, engine_settings

BLOCK_NS = 1e9  # of the run, for the bootstrap of its own unsteadiness
USUAL_SPEED_SPREAD = 0.03  # of two runs on one machine: docs/replay_accuracy.md measures it
MOST_REPEATS = 8


@dataclass(frozen=True, slots=True)
class Spread:
    """Relative standard deviations."""

    speed: float  # of the machine between runs, with the error of the step model
    repeats: int  # runs that it rests on; 0: none lay beside the run
    metrics: Mapping[str, float] = field(default_factory=dict)  # figure → of its logarithm

    def of_metric(self, name: str) -> float:
        return self.metrics.get(name, 0.0)


def spread_of(run: RunDirectory, meta: Mapping[str, Any], material: Material, requests: pd.DataFrame) -> Spread:
    own = _within(material)
    repeats = _repeats(run, meta)
    if not repeats:
        return Spread(speed=math.hypot(max(own, USUAL_SPEED_SPREAD), material.times.error / 2), repeats=0)
    found = [_figures(measured(requests, dict(meta)), meta), *repeats]
    metrics: dict[str, float] = {}
    for name in found[0]:
        values = np.array([each.get(name, math.nan) for each in found])
        values = values[~np.isnan(values) & (values > 0)]
        if len(values) > 1 and not name.startswith("attainment"):
            metrics[name] = float(np.log(values).std(ddof=1))
    speed = max(metrics.get("tpot_ms:p50", USUAL_SPEED_SPREAD), own)
    return Spread(speed=math.hypot(speed, material.times.error / 2), repeats=len(repeats), metrics=metrics)


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
    key = _key(meta)
    for file in sorted(Path(run.path).resolve().parent.glob("*/run.json"))[:200]:
        if file.parent == run.path.resolve() or len(found) >= MOST_REPEATS:
            continue
        try:
            other = RunDirectory.open(file.parent)
            other_meta = other.meta()
            if _key(other_meta) == key and other_meta.get("valid") is not False:
                found.append(_figures(measured(other.requests(), other_meta), other_meta))
        except (SojournError, OSError, KeyError, ValueError):  # another run that cannot be read tells nothing
            continue
    return found


def _key(meta: Mapping[str, Any]) -> tuple:
    scenario = {name: value for name, value in (meta.get("scenario") or {}).items() if name != "name"} if isinstance(
        meta.get("scenario"), dict) else meta.get("scenario")  # fmt: skip
    volatile = ("port", "run_dir", "host", "memory_bytes")
    settings = {name: value for name, value in engine_settings(dict(meta)).items() if name not in volatile}
    hardware = meta.get("hardware") or {}
    return (repr(scenario), meta.get("seed"), repr(sorted(settings.items(), key=str)), hardware.get("cpu"),
            hardware.get("cores"), repr(hardware.get("gpus")))  # fmt: skip


def _figures(rows: pd.DataFrame, meta: Mapping[str, Any]) -> dict[str, float]:
    return figures(recorded_answers(rows), meta.get("objectives"), None)
