"""Fits the confidence of a verdict to how often such verdicts were right on planted faults.

A logistic regression over the features that each finding carries (`confidence_features`). A confidence that is shown
of a recorded case comes from a fit without every case of the same fault, so that no case calibrates itself.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from sojourn.diagnosis.confidence import INTERCEPT, confidence
from sojourn.diagnosis.score.figures import Calibration, calibration
from sojourn.diagnosis.score.judgement import Judgement
from sojourn.metrics.errors import RunDataError

RIDGE = 1.0  # a standard normal prior on each coefficient: from few cases a fit would be sure of anything
MOST_ROUNDS = 100
CONVERGED = 1e-9
FEWEST_SAMPLES = 20  # of verdicts: below it, a fit is a guess about a guess


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One named cause: its features, and whether it was planted."""

    fault: str
    features: dict[str, float]
    right: bool
    is_first: bool


class Fit(msgspec.Struct, frozen=True, kw_only=True):
    """The coefficients, and how well they foretell verdicts that they were not fitted to."""

    coefficients: dict[str, float]
    samples: int
    faults: int
    held_out: Calibration | None  # each first finding by the fit without its fault


def samples_of(judgements: Sequence[Judgement]) -> list[Sample]:
    """The named causes of all runs that count. On a healthy control each one is wrong."""
    return [
        Sample(
            fault=each.true_key if each.record.truths else each.record.case,
            features=cause.features,
            right=any(cause.key in truth.keys for truth in each.record.truths),
            is_first=position == 0,
        )
        for each in judgements
        if each.counts and each.record.control != "overloaded"
        for position, cause in enumerate(each.said.causes)
        if cause.is_cause and cause.features
    ]


def fit_confidence(samples: Sequence[Sample]) -> Fit:
    """Raises RunDataError for too few samples."""
    if len(samples) < FEWEST_SAMPLES:
        raise RunDataError(f"{len(samples)} findings carry features of a confidence; a fit needs {FEWEST_SAMPLES}")
    faults = sorted({each.fault for each in samples})
    pairs = []
    for fault in faults:
        rest = [each for each in samples if each.fault != fault]
        weights = _fit(rest) if rest else {}
        pairs += [(confidence(each.features, weights), each.right) for each in samples
                  if each.fault == fault and each.is_first]  # fmt: skip
    return Fit(coefficients=_fit(samples), samples=len(samples), faults=len(faults), held_out=calibration(pairs))


def _fit(samples: Sequence[Sample]) -> dict[str, float]:
    """A feature that speaks against its own meaning (more evidence, less often right) is left out: that is chance."""
    names = sorted({name for each in samples for name in each.features})
    right = np.array([each.right for each in samples], dtype="float64")
    while True:
        table = np.array([[1.0, *(each.features.get(name, 0.0) for name in names)] for each in samples])
        weights = _logistic(table, right)
        if not names or (weights[1:] >= 0).all():
            return {
                INTERCEPT: float(weights[0]),
                **{name: float(w) for name, w in zip(names, weights[1:], strict=True)},
            }
        del names[int(np.argmin(weights[1:]))]


def _logistic(table: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Newton's method. `table` [samples, 1 + features] begins with a column of ones, which has no prior."""
    prior = np.diag([1e-6] + [RIDGE] * (table.shape[1] - 1))
    weights = np.zeros(table.shape[1])
    for _ in range(MOST_ROUNDS):
        chance = 1 / (1 + np.exp(-table @ weights))
        gradient = table.T @ (right - chance) - prior @ weights
        curvature = (table * (chance * (1 - chance))[:, None]).T @ table + prior
        step = np.linalg.solve(curvature, gradient)
        weights += np.clip(step, -5, 5)
        if np.abs(step).max() < CONVERGED:
            break
    return weights
