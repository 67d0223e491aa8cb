"""How sure a share or a ratio is, from samples that are not independent: requests of one run queue behind each other.

The effective number of samples, for Wilson's interval; quantiles of Student's t by Hill's expansion (1970).
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np

WINDOW = 5.0  # lags that are summed, in autocorrelation times (Sokal, 1997)
CAUTION = 1.5  # autocorrelation times of a few hundred samples come out too short


def effective_samples(latencies: Sequence[float] | np.ndarray) -> float:
    """How many independent requests say as much as these, which stand in the order in which they were due.

    The number over the integrated autocorrelation time of the ranks (Sokal, 1997); a failed request counts as the
    slowest. It is taken from the latencies and not from who kept them: a lucky stretch in which all kept theirs would
    hide that they hang together. What it cannot see: dependence that lasts longer than the sample.
    """
    values = np.nan_to_num(np.asarray(latencies, dtype="float64"), nan=math.inf)
    count = len(values)
    if count < 20:
        return float(count)
    distinct, ranks = np.unique(values, return_inverse=True)
    if len(distinct) == 1:
        return float(count)
    times = 2 * np.cumsum(_autocorrelations(ranks)) - 1
    stable = np.flatnonzero(np.arange(count) >= WINDOW * times)
    time = float(times[stable[0]]) if len(stable) else count / 2
    return count / max(1.0, CAUTION * time)


def initial_sequence_time(series: np.ndarray) -> float:
    """The integrated autocorrelation time of a series [samples], in samples, at least 1: sums of neighbouring pairs of
    autocorrelations are added while they are positive, each at most as large as the one before (Geyer, 1992)."""
    if len(series) < 2 or not float(np.ptp(series)) > 0:
        return 1.0
    found = _autocorrelations(series)
    pairs = found[: len(found) // 2 * 2].reshape(-1, 2).sum(axis=1)
    ends = np.flatnonzero(pairs <= 0)
    kept = np.minimum.accumulate(pairs[: int(ends[0]) if len(ends) else len(pairs)])
    return max(1.0, 2 * float(kept.sum()) - 1)


def _autocorrelations(series: np.ndarray) -> np.ndarray:
    """[lags], of lag 0 first."""
    centred, count = series - series.mean(), len(series)
    size = 1 << (2 * count - 1).bit_length()
    covariance = np.fft.irfft(np.abs(np.fft.rfft(centred, size)) ** 2, size)[:count]
    found: np.ndarray = covariance / covariance[0]
    return found


def t_quantile(probability: float, degrees: float) -> float:
    """Quantile of Student's t; within 1% for 4 degrees of freedom and more, too wide rather than too narrow below."""
    if degrees < 1:
        return math.inf
    if degrees < 3:  # exact for one and two
        tail = 2 * probability - 1
        if degrees < 2:
            return math.tan(math.pi * tail / 2)
        return tail * math.sqrt(2 / (1 - tail**2))
    z = NormalDist().inv_cdf(probability)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def t_tail(value: float, degrees: float) -> float:
    """P(T > value) of Student's t, by bisection on `t_quantile`."""
    if degrees < 1 or math.isnan(value):
        return 1.0
    low, high = 1e-12, 1 - 1e-12
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_quantile(middle, degrees) < value else (low, middle)
    return 1 - high


def growing(latencies: Sequence[float] | np.ndarray) -> bool:
    """Whether latencies still grew when the last of these requests, in the order in which they were due, was sent.

    The slope of their ranks over time is more than four standard errors above none, and the last third waited half as
    long again as the first. A queue that is longer than the sample grows, so that a short run would look better.
    """
    values = np.nan_to_num(np.asarray(latencies, dtype="float64"), nan=math.inf)
    count, third = len(values), len(values) // 3
    if third < 10 or not np.isfinite(values).any():
        return False
    ranks = np.unique(values, return_inverse=True)[1]
    if not ranks.any():
        return False
    place = np.arange(count) - (count - 1) / 2
    slope = float(place @ ranks) / float(place @ place)
    around = ranks - slope * place  # what is not the trend hangs together as it would without one
    error = float(around.std()) / math.sqrt(effective_samples(around) * float(place @ place) / count)
    first, last = np.median(values[:third]), np.median(values[-third:])
    return bool(slope > 4 * error and last > 1.5 * first)
