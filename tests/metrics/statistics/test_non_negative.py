"""Non-negative least squares, against all choices of the coefficients that are not nought."""

from itertools import product

import numpy as np
import pytest

from sojourn.metrics.statistics.non_negative import non_negative


def best_of_all(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """The best of the least squares over each subset of the features whose coefficients are not negative."""
    best, least = np.zeros(features.shape[1]), np.inf
    for chosen in product((False, True), repeat=features.shape[1]):
        found = np.zeros(features.shape[1])
        if any(chosen):
            found[list(chosen)] = np.linalg.lstsq(features[:, chosen], target, rcond=None)[0]
        error = ((features @ found - target) ** 2).sum()
        if (found >= 0).all() and error < least:
            best, least = found, error
    return best


@pytest.mark.parametrize("seed", range(10))
def test_coefficients_are_the_best_of_all_subsets(seed):
    random = np.random.default_rng(seed)
    features = random.random((40, 6)) * 10.0 ** random.integers(-3, 6, 6)
    target = features @ (np.maximum(random.normal(size=6), 0) / features.mean(axis=0)) + random.normal(size=40)
    found, free = non_negative(features.T @ features, features.T @ target, np.ones(6, bool), ridge=1e-13)
    np.testing.assert_allclose(features @ found, features @ best_of_all(features, target), rtol=1e-4, atol=1e-4)
    assert (found >= 0).all() and not found[~free].any()


def test_a_feature_that_was_not_seen_has_no_coefficient():
    features = np.array([[1.0, 0.0], [2.0, 0.0]])
    found, _ = non_negative(features.T @ features, features.T @ [3.0, 6.0], np.array([True, False]), ridge=0.0)
    assert found.tolist() == pytest.approx([3.0, 0.0])
