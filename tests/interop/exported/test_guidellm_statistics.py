"""Distributions over values, rates and concurrency, against truths that follow from what they are of."""

import numpy as np
import pytest

from sojourn.interop.exported.guidellm_statistics import GROUPS, concurrency, rates, summary, values_by_group

SAMPLES = [np.random.default_rng(seed).integers(0, 20, size=seed + 1) / 4 for seed in range(40)]


@pytest.mark.parametrize("values", SAMPLES, ids=len)
def test_moments_are_those_of_the_values(values):
    found = summary(values)
    assert found["count"] == len(values) and found["total_sum"] == pytest.approx(sum(values), abs=1e-6)
    assert found["std_dev"] == pytest.approx(np.std(values), abs=1e-3, rel=1e-6)
    percentiles = list(found["percentiles"].values())
    assert percentiles == sorted(percentiles) and set(percentiles) <= set(values)
    assert (found["min"], found["max"]) == (min(values), max(values))


@pytest.mark.parametrize("values", SAMPLES, ids=len)
def test_a_weight_is_as_many_values(values):
    weights = np.random.default_rng(1).integers(0, 4, size=len(values)).astype("float64")
    weighted, repeated = summary(values, weights), summary(np.repeat(values, weights.astype(int)))
    for name in ("mean", "variance", "count", "total_sum", "min", "max"):
        assert weighted[name] == pytest.approx(repeated[name], abs=1e-9)


def test_rate_of_even_events_is_their_frequency():
    found = rates(np.arange(0.05, 10, 0.1), np.full(100, 3.0), (0.0, 10.0))
    assert found["mean"] == pytest.approx(30, rel=0.02) and found["median"] == pytest.approx(30)
    assert found["count"] == 300


def test_mean_concurrency_is_the_open_time_over_the_window():
    generator = np.random.default_rng(0)
    begin = generator.uniform(0, 90, 200)
    end = begin + generator.uniform(0.1, 10, 200)
    found = concurrency(begin, end, np.ones(200), (0.0, 100.0))
    assert found["mean"] == pytest.approx((end - begin).sum() / 100, rel=1e-3)  # Little's law


def test_nothing_is_a_distribution_of_nothing():
    for found in (summary(np.empty(0)), rates(np.empty(0), np.empty(0)), concurrency(*[np.empty(0)] * 3)):
        assert found["count"] == 0 and found["mean"] == 0 and set(found["percentiles"].values()) == {0.0}


def test_groups_sum_to_the_total():
    group = np.array([*GROUPS, "successful"], dtype=object)
    found = values_by_group(group, np.array([1.0, 2.0, 3.0, 4.0]))
    assert sum(found[name]["total_sum"] for name in GROUPS) == found["total"]["total_sum"] == 10
