"""How sure the mean of a series is, and when it changed."""

import numpy as np
import pytest

from sojourn.interop.held.courses import Course, change_point, change_points, ratio_bounds
from tests.further import further
from tests.metrics.compare.test_pairs import correlated


def course(values, name="ttft_ms") -> Course:
    count = len(values)
    return Course(name, "ms", np.column_stack([np.arange(count), np.arange(1, count + 1)]), values, np.ones(count))


def noise(random, count, neighbours, names=("ttft_ms", "tpot_ms", "e2e_ms", "running", "waiting")):
    return [course(100 * np.exp(0.4 * correlated(random, count, neighbours)), name) for name in names]


@pytest.mark.parametrize(
    ("count", "neighbours"),
    [(60, 0.5), *further((60, 0.9), (60, 0.95), (60, 0.0), (60, 0.8), (80, 0.0), (120, 0.5), (80, 0.9), (80, 0.95))],
)
def test_five_series_without_a_change_have_one_in_at_most_one_case_of_twenty(count, neighbours):
    random = np.random.default_rng(2)
    assert sum(bool(change_points(noise(random, count, neighbours))) for _ in range(100)) <= 5


def test_a_change_is_found_at_its_moment_whatever_its_place():
    random, found = np.random.default_rng(3), []
    for _ in range(40):
        place = int(random.integers(12, 68))
        values = 100 * np.exp(0.3 * correlated(random, 80, 0.3))
        values[place:] *= 3
        change = change_point(course(values))
        found += [] if change is None else [abs(change.end_ns - 1 - place)]
    assert len(found) >= 20 and np.median(found) <= 1


@pytest.mark.parametrize("neighbours", [0.5, *further(0.0, 0.9)])
def test_the_interval_of_a_ratio_holds_the_truth(neighbours):
    random, outside = np.random.default_rng(4), 0
    for _ in range(200):
        before, after = noise(random, 60, neighbours, ("a", "b"))
        low, high = ratio_bounds(before, after)
        outside += not low <= 1 <= high
    assert outside <= 14  # 10 expected of an exact interval
    assert ratio_bounds(course(np.ones(5)), course(np.ones(60))) is None
