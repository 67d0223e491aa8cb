"""An interval covers the truth as often as it says, and says nothing where the sample is too small."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.metrics.statistics.intervals import (
    block_length,
    bootstrap_mean,
    clustered_mean_interval,
    clustered_quantile_interval,
    mean_interval,
    quantile_interval,
    series_quantile_intervals,
    share_interval,
    wilson,
    wilson_bounds,
)

few = settings(max_examples=50)


def autoregressive(random: np.random.Generator, count: int, memory: float) -> np.ndarray:
    noise, values = random.normal(size=count + 100), [0.0]
    for step in noise:
        values.append(memory * values[-1] + step)
    return np.array(values[101:])


@few
@given(st.integers(0, 300), st.integers(0, 300))
def test_wilson_encloses_the_share_and_stays_between_0_and_1(good, bad):
    bounds = wilson(good, good + bad)
    share = good / (good + bad) if good + bad else 0.5
    assert 0 <= bounds.low <= share <= bounds.high <= 1
    mirrored = wilson(bad, good + bad)  # what holds for good ones holds for bad ones
    assert mirrored.low == pytest.approx(1 - bounds.high) and mirrored.high == pytest.approx(1 - bounds.low)


@few
@given(st.floats(0, 1), st.floats(0.5, 10_000), st.floats(0.5, 5))
def test_wilson_bounds_enclose_the_share_and_narrow_with_samples(share, samples, quantile):
    low, high = wilson_bounds(share, samples, quantile)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    wider = wilson_bounds(share, samples / 2, quantile)
    assert wider[1] - wider[0] >= high - low - 1e-12


@few
@given(st.integers(0, 300), st.integers(1, 300))
def test_a_report_and_a_search_give_a_share_the_same_bounds(good, bad):
    """Where the requests are independent: 1.96 is the quantile of 95 %."""
    bounds, total = wilson(good, good + bad), good + bad
    assert wilson_bounds(good / total, total, 1.959964) == pytest.approx((bounds.low, bounds.high), abs=1e-6)


def test_wilson_gives_the_figures_of_the_textbook():
    bounds = wilson(81, 263)  # Newcombe, 1998, table I
    assert (round(bounds.low, 4), round(bounds.high, 4)) == (0.2553, 0.3662)
    assert round(wilson(0, 20).high, 4) == 0.1611
    with pytest.raises(ValueError, match="3 successes of 2 trials"):
        wilson(3, 2)


def test_bounds_of_a_quantile_are_measured_values_with_binomial_coverage():
    values = np.arange(1.0, 101.0)
    bounds = quantile_interval(values, 0.5)
    ranks = int(bounds.low), int(bounds.high)
    chance = sum(math.comb(100, k) for k in range(ranks[0], ranks[1])) / 2**100
    assert chance >= 0.95 and ranks == (40, 61)
    assert quantile_interval(values[:5], 0.5) is None  # 1 - 2 * 0.5 ** 5 is below 95 %
    assert quantile_interval(values[:6], 0.5).low == 1.0


def test_bound_of_a_quantile_among_failures_is_not_claimed():
    values = np.concatenate([np.arange(95.0), np.full(5, math.inf)])
    bounds = quantile_interval(values, 0.9)
    assert bounds.low is not None and bounds.high is None


@few
@given(st.lists(st.floats(0.1, 1e4), min_size=10, max_size=60), st.integers(-5, 5))
def test_interval_of_a_mean_scales_with_its_unit(values, power):
    factor = 2.0**power  # exact, so that ties stay ties
    once = bootstrap_mean(np.array(values), resamples=50)
    scaled = bootstrap_mean(factor * np.array(values), resamples=50)
    assert scaled.low == pytest.approx(factor * once.low) and scaled.high == pytest.approx(factor * once.high)
    assert once == bootstrap_mean(np.array(values), resamples=50)  # the same seed gives the same interval


def test_small_sample_has_no_interval():
    assert mean_interval(np.arange(9.0)) is None and mean_interval(np.arange(10.0)) is not None
    assert quantile_interval(np.array([]), 0.5) is None


def test_blocks_are_drawn_only_where_neighbours_hang_together():
    random = np.random.default_rng(0)
    lengths = [block_length(random.normal(size=500)) for _ in range(40)]
    assert lengths.count(1) >= 36
    assert min(block_length(autoregressive(random, 500, 0.8)) for _ in range(20)) > 5
    assert block_length(np.full(100, 3.0)) == 1


def test_correlated_samples_have_the_wider_interval():
    values = autoregressive(np.random.default_rng(1), 1000, 0.8)
    width = {block: _width(bootstrap_mean(values, block=block)) for block in (1, block_length(values))}
    assert max(width.values()) > 2 * width[1]  # the truth is √((1 + 0.8) / (1 - 0.8)) = 3 times as wide


def _width(bounds) -> float:
    return bounds.high - bounds.low


def _coverage(truth: float, intervals) -> float:
    return float(np.mean([bounds.low <= truth <= bounds.high for bounds in intervals]))


@pytest.mark.slow
def test_nominal_95_percent_covers_93_to_97_percent_of_known_distributions():
    random, times = np.random.default_rng(20), 1000
    drawn = [random.exponential(size=200) for _ in range(times)]
    within = {
        "wilson 0.5": _coverage(0.5, [wilson(int(k), 400) for k in random.binomial(400, 0.5, times)]),
        "wilson 0.9": _coverage(0.9, [wilson(int(k), 400) for k in random.binomial(400, 0.9, times)]),
        "p50": _coverage(math.log(2), [quantile_interval(values, 0.5) for values in drawn]),
        "p90": _coverage(math.log(10), [quantile_interval(values, 0.9) for values in drawn]),
        "mean, exponential": _coverage(1, [bootstrap_mean(v, seed=i) for i, v in enumerate(drawn)]),
        "mean, normal": _coverage(0, [mean_interval(random.normal(size=200), seed=i) for i in range(times)]),
    }
    correlated = [autoregressive(random, 1000, 0.5) for _ in range(times)]
    within["mean, correlated"] = _coverage(0, [mean_interval(v, seed=i) for i, v in enumerate(correlated)])
    assert {name: share for name, share in within.items() if not 0.93 <= share <= 0.97} == {}
    as_if_independent = _coverage(0, [bootstrap_mean(v, seed=i) for i, v in enumerate(correlated[:300])])
    assert as_if_independent < 0.85  # what the blocks are for


@pytest.mark.slow
def test_intervals_of_clusters_and_of_queues_cover_93_to_97_percent():
    random, times = np.random.default_rng(21), 1000
    gaps = [random.gamma(4, 5 * random.lognormal(0, 0.3, (100, 1)), (100, 30)) for _ in range(times)]
    requests = np.repeat(np.arange(100), 30)
    drawn = random.gamma(4, 5 * random.lognormal(0, 0.3, (200_000, 1)), (200_000, 10))
    waits = [autoregressive(random, 1000, 0.5) for _ in range(times)]
    scale = 1 / math.sqrt(1 - 0.5**2)
    within = {
        "itl p50": _coverage(
            np.quantile(drawn, 0.5), [clustered_quantile_interval(v.ravel(), requests, 0.5) for v in gaps]
        ),
        "itl p90": _coverage(
            np.quantile(drawn, 0.9), [clustered_quantile_interval(v.ravel(), requests, 0.9) for v in gaps]
        ),
        "itl mean": _coverage(drawn.mean(), [clustered_mean_interval(v.ravel(), requests) for v in gaps]),
        "ttft p50": _coverage(0, [series_quantile_intervals(v, [0.5])[0] for v in waits]),
        "ttft p90": _coverage(1.2816 * scale, [series_quantile_intervals(v, [0.9])[0] for v in waits]),
        "attainment": _coverage(0.9, [share_interval(v < 1.2816 * scale) for v in waits]),
    }
    assert {name: share for name, share in within.items() if not 0.93 <= share <= 0.97} == {}
    assert _coverage(0.5, [wilson(int((v < 0).sum()), 1000) for v in waits]) < 0.9  # what the blocks are for
