"""The distributions of a GuideLLM report, as its 0.8 defines them: of values, of rates over time, of concurrency.

Each is given for the requests that succeeded, were incomplete, or failed, and for all. A distribution may be weighted:
a rate by how long it lasted, a time between tokens by how many tokens it is of.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

Json = dict[str, Any]
Array = np.ndarray
GROUPS = ("successful", "incomplete", "errored")
PERCENTILES = {"p001": 0.001, "p01": 0.01, "p05": 0.05, "p10": 0.1, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p90": 0.9,
               "p95": 0.95, "p99": 0.99, "p999": 0.999}  # fmt: skip
MERGED_S = 1e-4  # events nearer than this are one event of a rate
SHORTEST_S = 1e-6  # the last event of a rate lasts at least this


def summary(values: Array, weights: Array | None = None, count: int | None = None) -> Json:
    """Moments and percentiles. Values of weight 0 are left out; `count` is by default the sum of the weights."""
    values = np.asarray(values, dtype="float64")
    weights = np.ones(len(values)) if weights is None else np.asarray(weights, dtype="float64")
    count = round(float(weights.sum())) if count is None else count
    order = np.argsort(values[weights > 0], kind="stable")
    values, weights = values[weights > 0][order], weights[weights > 0][order]
    if not len(values):
        return _figures(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, count) | {"percentiles": dict.fromkeys(PERCENTILES, 0.0)}
    values, place = np.unique(values, return_inverse=True)
    shares = np.bincount(place, weights) / weights.sum()
    reached = np.minimum(np.searchsorted(np.cumsum(shares), list(PERCENTILES.values())), len(values) - 1)
    percentiles = dict(zip(PERCENTILES, values[reached].tolist(), strict=True))
    mean = float((values * shares).sum())
    variance = float(((values - mean) ** 2 * shares).sum())
    mode = float(values[np.argmax(shares)])
    figures = _figures(mean, percentiles["p50"], mode, variance, float(values[0]), float(values[-1]), count)
    return figures | {"percentiles": percentiles}


def _figures(mean: float, median: float, mode: float, variance: float, low: float, high: float, count: int) -> Json:
    return {
        "mean": mean, "median": median, "mode": mode, "variance": variance, "std_dev": variance**0.5, "min": low,
        "max": high, "count": count, "total_sum": mean * count, "pdf": None, "mean_ci": None, "percentile_cis": None,
    }  # fmt: skip


def by_group(group: Array, of: Callable[[Array], Json]) -> Json:
    """What `of` says of the rows that a mask selects, for each group and for all."""
    return {name: of(group == name) for name in GROUPS} | {"total": of(np.ones(len(group), dtype=bool))}


def values_by_group(group: Array, values: Array, weights: Array | None = None) -> Json:
    return by_group(group, lambda mask: summary(values[mask], None if weights is None else weights[mask]))


def rates_by_group(group: Array, times: Array, weights: Array, window: tuple[float, float] | None = None) -> Json:
    return by_group(group, lambda mask: rates(times[mask], weights[mask], window))


def rates(times: Array, weights: Array, window: tuple[float, float] | None = None) -> Json:
    """Events per second. An event lasts from the middle of the gap before it to the middle of the gap after it."""
    if window is not None:
        inside = (times >= window[0]) & (times <= window[1])
        times = np.concatenate(([window[0]], times[inside], [window[1]]))
        weights = np.concatenate(([0.0], weights[inside], [0.0]))
    times, weights = _merged(times, weights)
    if len(times) <= 1:
        return summary(np.empty(0), count=len(times))
    middles = (times[1:] + times[:-1]) / 2
    durations = np.diff(np.concatenate((times[:1], middles, times[-1:])))
    durations[-1] = max(durations[-1], SHORTEST_S)
    return summary(weights / durations, durations, count=round(float(weights.sum())))


def concurrency_by_group(
    group: Array, begin: Array, end: Array, weights: Array, window: tuple[float, float] | None = None
) -> Json:
    return by_group(group, lambda mask: concurrency(begin[mask], end[mask], weights[mask], window))


def concurrency(begin: Array, end: Array, weights: Array, window: tuple[float, float] | None = None) -> Json:
    """How much was open at a time, weighted by how long."""
    times, changes = _merged(np.concatenate((begin, end)), np.concatenate((weights, -weights)))
    if window is not None and len(times):
        first, last = np.searchsorted(times, window[0], "left"), np.searchsorted(times, window[1], "right")
        times = np.concatenate(([window[0]], times[first:last], [window[1]]))
        changes = np.concatenate(([changes[:first].sum()], changes[first:last], [0.0]))
    opened = np.clip(np.cumsum(changes), 0, None)
    if len(opened) <= 1:
        return summary(opened if len(begin) else np.empty(0))
    durations = np.clip(np.diff(times), 0, None)
    if not durations.any():
        return summary(np.empty(0), count=len(begin))
    return summary(opened[:-1], durations, count=len(begin))


def _merged(times: Array, weights: Array) -> tuple[Array, Array]:
    """Events in order. All within MERGED_S of the first of them are one, at its time."""
    times, place = np.unique(times, return_inverse=True)
    weights = np.bincount(place, weights, minlength=len(times))
    reach = np.searchsorted(times, times + MERGED_S, "right")
    starts, at = [], 0
    while at < len(times):
        starts.append(at)
        at = int(reach[at])
    return times[starts], np.add.reduceat(weights, starts) if starts else weights


def known(value: Any) -> Any:
    return None if value != value else value


def count(value: float) -> int | None:
    return None if value != value else int(value)
