"""Non-negative least squares of relative errors, which a few readings far from all others do not move.

Errors far beyond the usual are clipped (Huber, 1964), and no reading weighs more than one of a quarter of what is
expected: one that is far too short would otherwise have the largest weight of all.
"""

from collections.abc import Sequence

import numpy as np

from sojourn.metrics.statistics.non_negative import NEGLIGIBLE_WEIGHT, Alike, non_negative

MOST_ROWS = 6_000  # more would not move the coefficients
ROUNDS = 6
USUAL_ERROR = (0.02, 0.3)  # bounds of the relative error that counts as usual; thrice that is clipped
RIDGE = 1e-6  # of a feature's own weight: decides between features that always occur together


def fitted(
    features: np.ndarray,
    measured_ns: np.ndarray,
    guessed: Sequence[tuple[np.ndarray, np.ndarray]] = (),
    alike: Alike | None = None,
) -> np.ndarray:
    """Coefficients, none below nought. `guessed` are further features and times, each as good as one that was
    measured. Times that are no number, or below nought, are no readings."""
    known = measured_ns >= 0  # NaN is not
    features, measured_ns = features[known & np.isfinite(measured_ns)], measured_ns[known & np.isfinite(measured_ns)]
    if len(features) > MOST_ROWS:  # evenly chosen over the run
        chosen = np.linspace(0, len(features) - 1, MOST_ROWS).astype(int)
        rare = np.flatnonzero(features[:, 1] > np.median(features[:, 1]))
        if len(rare) > MOST_ROWS:
            rare = rare[np.linspace(0, len(rare) - 1, MOST_ROWS).astype(int)]
        chosen = np.union1d(chosen, rare)
        features, measured_ns = features[chosen], measured_ns[chosen]
    for more, ns in guessed:
        features, measured_ns = np.concatenate([features, more]), np.concatenate([measured_ns, ns])
    coefficients = np.zeros(features.shape[1])
    if not len(features):
        return coefficients
    unit = np.maximum(measured_ns, max(float(np.median(measured_ns)) / 4, 1.0))
    trust = np.ones(len(measured_ns))
    for _ in range(ROUNDS):
        weight = trust / unit**2
        weighted = features * weight[:, None]
        gram = weighted.T @ features
        usable = np.diagonal(gram) > NEGLIGIBLE_WEIGHT
        coefficients, _ = non_negative(gram, weighted.T @ measured_ns, usable, ridge=RIDGE, alike=alike)
        expected = np.maximum(features @ coefficients, 1.0)
        errors = np.abs(measured_ns - expected) / np.maximum(expected, unit / 2)
        usual = float(np.clip(np.median(errors), *USUAL_ERROR))
        trust = np.minimum(1.0, 3 * usual / np.maximum(errors, 1e-9))
        unit = np.maximum(expected, max(float(np.median(expected)) / 4, 1.0))
    return coefficients
