"""How far a figure from a sample can be trusted: intervals for shares, means and quantiles. Pure functions, numpy only.

An interval says where the true value lies if the run was repeated under the same conditions and its samples are a fair
draw. What it cannot tell: that another hour, machine or build would give the same.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import msgspec
import numpy as np

LEVEL = 0.95
TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
NORMAL_QUANTILE = NormalDist().inv_cdf(TAILS[1])
RESAMPLES = 1_000
LARGEST_DRAW = 4_000_000  # values of a bootstrap in memory at a time
CORRELATED = 1.5  # an automatic block length above it: neighbours are not independent
LONGER_BLOCKS = 1.5  # than Politis and White's, whose length is best for the variance and covers too little

Method = Literal["wilson", "order statistics", "bca bootstrap", "block bootstrap", "clusters"]
FEWEST_SAMPLES = 10  # and clusters: below it an interval would be a guess about a guess
LARGEST_BOOTSTRAP = 5_000  # samples: of more, a mean is normal to within what 1,000 resamples could show


class Interval(msgspec.Struct, frozen=True, kw_only=True):
    """Where the true value lies with probability `level`. None where a bound lies beyond what was measured."""

    low: float | None
    high: float | None
    method: Method
    level: float = LEVEL


def wilson(successes: int, trials: int) -> Interval:
    """Of a share, from independent trials (Wilson, 1927). Never outside 0 to 1, and never empty at 0 or all successes.

    Raises ValueError unless 0 ≤ successes ≤ trials.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials: successes must lie between 0 and the trials")
    return _wilson(successes / trials if trials else 0.0, trials)


def wilson_bounds(share: float, samples: float, quantile: float) -> tuple[float, float]:
    """Bounds of a share that was seen in `samples`, which need not be whole. (0, 1) without a sample.

    `quantile` is of the normal distribution, 1.96 for 95%, or of Student's t.
    """
    if samples <= 0:
        return 0.0, 1.0
    spread = quantile**2 / samples
    centre = (share + spread / 2) / (1 + spread)
    half = math.sqrt(share * (1 - share) * spread + spread**2 / 4) / (1 + spread)
    # Of none or all the formula gives 0 or 1 but for rounding
    return 0.0 if share == 0 else max(0.0, centre - half), 1.0 if share == 1 else min(1.0, centre + half)


def quantile_interval(values: np.ndarray, quantile: float) -> Interval | None:
    """Of a quantile, from order statistics of independent samples: exact for any distribution, and cheap.

    `values` may hold infinity for what never ended: a bound that falls there is None. None where the sample is too
    small for any two of its values to enclose the quantile at LEVEL.
    """
    ordered = np.sort(np.asarray(values, dtype="float64"))
    count = len(ordered)
    if not count or not 0 < quantile < 1:
        return None
    below = _binomial_cumulative(count, quantile)  # below[k]: chance that at most k samples lie below the quantile
    # The bounds are the order statistics (counted from 1) low_rank and high_rank: coverage is P(low ≤ K < high)
    low_rank = int(np.searchsorted(below, TAILS[0], side="right"))
    high_rank = int(np.searchsorted(below, TAILS[1], side="left")) + 1
    if low_rank < 1 or high_rank > count:
        return None
    low, high = _finite(ordered[low_rank - 1]), _finite(ordered[high_rank - 1])
    return Interval(low=low, high=high, method="order statistics")


def mean_interval(values: np.ndarray, *, seed: int = 0, most: float = math.inf) -> Interval | None:
    """Of a mean, in the order of measurement: by blocks where neighbours are correlated; None below 10 samples. No
    value is above `most`: 1 of shares."""
    block = block_length(values)
    if len(values) > LARGEST_BOOTSTRAP:
        found = clustered_mean_interval(values, np.arange(len(values)) // block)
    else:
        found = bootstrap_mean(values, seed=seed, block=block)
    if found is None or found.high is None or found.high <= most:
        return found
    return msgspec.structs.replace(found, high=most)


def share_interval(flags: np.ndarray) -> Interval:
    """Of a share of yes and no in the order of measurement: Wilson's, for as many trials as they are worth.

    Neighbours that share their fate (a queue that stands) tell less than as many independent ones: their number is
    divided by the variance of blocks over that of independent samples, the design effect of Kish (1965).
    """
    sample = np.asarray(flags, dtype="float64")
    count, good = len(sample), int(np.sum(sample))
    block = block_length(sample)
    if block == 1 or not 0 < good < count:
        return wilson(good, count)
    share = good / count
    # Of flags the correlation shows weakly: blocks of twice the length cover as often as they should
    variance = _ratio_error(sample, np.arange(count) // (2 * block), share) ** 2
    worth = max(1.0, min(float(count), share * (1 - share) / variance)) if variance > 0 else float(count)
    return _wilson(share, worth)


def series_quantile_intervals(values: np.ndarray, quantiles: Sequence[float]) -> list[Interval | None]:
    """Of quantiles, in the order of measurement: order statistics, or by blocks where neighbours are correlated."""
    sample = np.asarray(values, dtype="float64")
    ranks = np.searchsorted(np.sort(sample), sample).astype("float64")  # infinity has a rank, but no variance
    block = block_length(ranks)
    if block == 1:
        return [quantile_interval(sample, quantile) for quantile in quantiles]
    clusters = np.arange(len(sample)) // block
    return [clustered_quantile_interval(sample, clusters, quantile) for quantile in quantiles]


def clustered_quantile_interval(values: np.ndarray, clusters: np.ndarray, quantile: float) -> Interval | None:
    """Of a quantile of samples that come in clusters, such as the gaps between the tokens of a request.

    Woodruff (1952): the error of the share below the quantile, from whole clusters, read back at the quantiles around.
    `clusters` has a number for each value. None with fewer than 10 clusters; a bound beyond what was measured is None.
    """
    sample = np.asarray(values, dtype="float64")
    if not len(sample) or len(np.unique(clusters)) < FEWEST_SAMPLES:
        return None
    ordered = np.sort(sample)
    estimate = ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]
    error = _ratio_error((sample <= estimate).astype("float64"), clusters, quantile)
    half = NORMAL_QUANTILE * error
    low, high = math.floor((quantile - half) * len(ordered)) - 1, math.ceil((quantile + half) * len(ordered)) - 1
    return Interval(
        low=_finite(ordered[low]) if low >= 0 else None,
        high=_finite(ordered[high]) if high < len(ordered) else None,
        method="clusters",
    )


def clustered_mean_interval(values: np.ndarray, clusters: np.ndarray) -> Interval | None:
    """Of the mean of samples that come in clusters, from whole clusters; None with fewer than 10 clusters."""
    sample = np.asarray(values, dtype="float64")
    if len(np.unique(clusters)) < FEWEST_SAMPLES:
        return None
    centre = float(sample.mean())
    half = NORMAL_QUANTILE * _ratio_error(sample, clusters, centre)
    return _of_mean(centre - half, centre + half, sample, "clusters")


def bootstrap_mean(values: np.ndarray, *, seed: int = 0, resamples: int = RESAMPLES, block: int = 1) -> Interval | None:
    """Of a mean, by resampling with a seed; None below 10 samples.

    With `block` 1 samples are independent: bias-corrected and accelerated (Efron, 1987). With a longer one they are in
    the order of measurement, and circular blocks are drawn whole (Politis and Romano, 1992).
    """
    sample = np.asarray(values, dtype="float64")
    sample = sample[~np.isnan(sample)]
    count = len(sample)
    if count < FEWEST_SAMPLES:
        return None
    random = np.random.default_rng(seed)
    resampled = _resampled_means(sample, random, resamples, min(block, count))
    if block > 1:
        centre, wider = float(sample.mean()), student(count / block)
        low, high = (centre + wider * (bound - centre) for bound in np.quantile(resampled, TAILS))
        return _of_mean(low, high, sample, "block bootstrap")
    low, high = np.quantile(resampled, _bca_tails(sample, resampled))
    return _of_mean(low, high, sample, "bca bootstrap")


def _of_mean(low: float, high: float, sample: np.ndarray, method: Method) -> Interval:
    """The mean of what is never below nought is not either, however far a symmetric interval reaches."""
    return Interval(low=max(0.0, float(low)) if sample.min() >= 0 else float(low), high=float(high), method=method)


def block_length(values: np.ndarray) -> int:
    """How many samples in a row hang together: 1 where they are independent (Politis and White, 2004, circular)."""
    sample = np.asarray(values, dtype="float64")
    sample = sample[~np.isnan(sample)]
    count = len(sample)
    if count < 20 or float(np.std(sample)) <= 1e-12 * abs(float(np.mean(sample))):
        return 1
    centred = sample - sample.mean()
    quiet, longest = max(5, math.ceil(math.sqrt(math.log10(count)))), math.ceil(math.sqrt(count))
    lags = np.arange(min(count - 1, longest + quiet) + 1)
    covariance = np.array([float(centred[: count - lag] @ centred[lag:]) / count for lag in lags])
    near = np.abs(covariance[1:] / covariance[0]) < 2 * math.sqrt(math.log10(count) / count)
    runs = [lag for lag in range(len(near) - quiet + 1) if near[lag : lag + quiet].all()]
    last = min(2 * (runs[0] if runs else longest), len(lags) - 1)
    if not last:
        return 1
    used = lags[1 : last + 1]
    window = np.clip(2 * (1 - used / last), 0, 1)  # flat up to half, then down to 0
    slope = 2 * float(np.sum(window * used * covariance[1 : last + 1]))
    spectrum = covariance[0] + 2 * float(np.sum(window * covariance[1 : last + 1]))
    if spectrum <= 0:
        return 1
    length = (2 * slope**2 / (4 / 3 * spectrum**2)) ** (1 / 3) * count ** (1 / 3)
    bounded = min(length, 3 * math.sqrt(count))
    return round(min(LONGER_BLOCKS * bounded, count / 4)) if bounded >= CORRELATED else 1


def _wilson(share: float, trials: float) -> Interval:
    low, high = wilson_bounds(share, trials, NORMAL_QUANTILE)
    return Interval(low=low, high=high, method="wilson")


def _ratio_error(values: np.ndarray, clusters: np.ndarray, centre: float) -> float:
    """Standard error of the mean of all `values`, each cluster drawn as a whole (Cochran's ratio estimator)."""
    _, place = np.unique(clusters, return_inverse=True)
    sums = np.bincount(place, weights=values - centre)
    number = len(sums)
    return student(number) * math.sqrt(float(np.sum(sums**2)) * number / max(number - 1, 1)) / len(values)


def student(groups: float, quantile: float = NORMAL_QUANTILE) -> float:
    """How much wider Student's t is than the normal at a quantile of it, by default that of 95%, to first order: few
    groups tell little of their spread."""
    return 1 + (1 + quantile**2) / (4 * max(groups - 1, 1))


def _resampled_means(sample: np.ndarray, random: np.random.Generator, resamples: int, block: int) -> np.ndarray:
    count, results = len(sample), []
    blocks = math.ceil(count / block)
    at_once = max(1, LARGEST_DRAW // count)
    while resamples > 0:
        rows = min(resamples, at_once)
        starts = random.integers(0, count, (rows, blocks))
        places = (starts[:, :, None] + np.arange(block)).reshape(rows, -1)[:, :count] % count
        results.append(sample[places].mean(axis=1))
        resamples -= rows
    return np.concatenate(results)


def _bca_tails(sample: np.ndarray, resampled: np.ndarray) -> tuple[float, float]:
    """Which quantiles of the resampled means bound the true one: shifted for their bias and skew."""
    normal, centre = NormalDist(), float(sample.mean())
    below = (np.sum(resampled < centre) + 0.5 * np.sum(resampled == centre)) / len(resampled)
    if not 0 < below < 1:
        return TAILS
    bias = normal.inv_cdf(float(below))
    groups = np.array_split(np.arange(len(sample)), min(len(sample), 100))  # a grouped jackknife: linear in time
    left_out = np.array([float(np.delete(sample, group).mean()) for group in groups])
    pull = left_out.mean() - left_out
    spread = float(np.sum(pull**2)) ** 1.5
    acceleration = float(np.sum(pull**3)) / (6 * spread) if spread > 0 else 0.0
    low, high = (bias + normal.inv_cdf(tail) for tail in TAILS)
    return normal.cdf(bias + low / (1 - acceleration * low)), normal.cdf(bias + high / (1 - acceleration * high))


def _binomial_cumulative(trials: int, chance: float) -> np.ndarray:
    """P(at most k of `trials`) for k from 0 to `trials`, in logarithms, so that a million trials do not underflow."""
    ks = np.arange(trials + 1)
    factorials = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, trials + 1)))))
    choose = factorials[-1] - factorials - factorials[::-1]
    return np.cumsum(np.exp(choose + ks * math.log(chance) + (trials - ks) * math.log1p(-chance)))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
