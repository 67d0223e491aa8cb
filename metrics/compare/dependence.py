"""What one run says of a mean or a quantile of its requests, which depend on each other: one queue makes a hundred of
them slow. Pure.

The standard error is that of as many independent requests as the series is worth: their number over the autocorrelation
time, the largest of three estimates. These are Geyer's initial monotone sequence (1992), with a margin, a first-order
autoregression corrected for the length of the series (Kendall, 1954), and, for what waits in a queue, both of the
latencies of the run: the queue remembers as long as they do. Student's t has as many degrees of freedom.

Fewer than FEWEST_INDEPENDENT of them, or a queue that grows, are one realisation of a queue, and its mean says little
about another one: near saturation the run length that a mean needs grows without bound (Whitt, 1989). Such a series is
taken for a random walk, whose mean over n steps has the standard deviation of a step times √(n/3), and whose step is
known from the differences of the means of neighbouring blocks. A queue that empties at times wanders less. Two runs of
one schedule are compared request by request: the series is then that of the differences.

A growing queue also stretches the small difference in speed that two runs of one system have, by 1 + (length of the run
/ latency at its end): it is arrivals minus service. So USUAL_SPEED_SPREAD, stretched, is added to the error.

A quantile's error is that of the share below it, turned into values (Woodruff, 1952; of queues Heidelberger and Lewis,
1984). What it cannot see: a system that differs from run to run as a whole.

Steps, and tokens of windows of time, need not decay as one autoregression does: noise on a slow drift looks independent
from one to the next. They are weighed by the means of up to BLOCKS parts of the run, which average the noise out. Parts
that depend on each other over more than WALKS of them are one realisation of a drift, too.

`tests/metrics/compare/test_drift.py` and `tests/metrics/compare/test_pairs.py` count the wrong verdicts on runs that do
not differ.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sojourn.metrics.compare.metrics import QUANTILES, SHARES, Metric
from sojourn.metrics.compare.samples import RunSamples, samples_of
from sojourn.metrics.compare.verdict import LEAST, Evidence, statistic, worsening
from sojourn.metrics.statistics.dependent_samples import CAUTION, growing, initial_sequence_time

FEWEST_REQUESTS = 40
FEWEST_INDEPENDENT = 10.0
BLOCKS = 16  # of a walk, or of a series
WALKS = 2.5  # correlation time of the means of blocks, in blocks
SHORT = 0.12  # of a block: samples that depend on each other for less leave its neighbour alone
REMEMBERS_ALL = 4.0  # a correlation time above the run over this is as good as the whole run
WITHOUT_QUEUE = ("tpot_ms",)
USUAL_SPEED_SPREAD = 0.03  # of a run on a machine that nobody else uses: docs/results/replay_accuracy.md measures it


class Queue(NamedTuple):
    """The latencies of one run, in the order in which its requests were due."""

    levels: np.ndarray  # [requests] logarithm of the end-to-end latency
    grows: bool
    stretch: float  # relative change of a latency for one of the server's speed, of a queue that remembers; else 0


class Error(NamedTuple):
    """Standard error of a mean. `of_speed`, relative, is what such a queue makes of the speed of the system."""

    error: float
    degrees: float
    independent: float  # requests that would say as much
    remembers: bool  # over too much of the run
    of_speed: float = 0.0


def queue_of(side: RunSamples) -> Queue:
    latency = side.requests.e2e_ms.astype("float64").where(side.requests.served)
    levels_ms = latency.fillna(latency.max()).fillna(0.0).to_numpy()  # one without was as slow as the slowest
    levels = np.log(np.maximum(levels_ms, LEAST))
    grows = growing(levels_ms)
    if not grows and first_order_time(levels) <= len(levels) / REMEMBERS_ALL:
        return Queue(levels, grows, 0.0)
    due_ms = float(side.requests.due_ns.max() - side.begin_ns) / 1e6
    at_end = float(np.median(levels_ms[-(len(levels_ms) // 3) :]))
    return Queue(levels, grows, 1 + due_ms / max(at_end, LEAST))


def error_of_mean(added: np.ndarray, queues: Sequence[Queue], what: str) -> Error:
    """Of what each request, or each pair of them, adds to a mean: [requests], in the order in which they were due.
    `queues` are those of one run, or of both where requests are taken in pairs."""
    count, spread = len(added), float(added.std())
    waits = what not in WITHOUT_QUEUE
    levels = [each.levels for each in queues] if waits else []
    series = [added, *levels, *([levels[1] - levels[0]] if len(levels) > 1 else [])]
    time = max(max(first_order_time(each), CAUTION * initial_sequence_time(each)) for each in series)
    independent = count / time
    remembers = independent < FEWEST_INDEPENDENT or (waits and any(each.grows for each in queues))
    of_speed = USUAL_SPEED_SPREAD * math.hypot(*(each.stretch for each in queues)) if waits else 0.0
    error = spread / math.sqrt(max(independent - 1, 0.5))
    if not remembers:
        return Error(error, independent - 1, independent, False, of_speed)
    blocks = min(BLOCKS, count // 2)
    if blocks < 4:  # too few for a walk: as good as one request
        return Error(spread * math.sqrt(count / max(count - 1, 1)), count - 1, 1.0, True, of_speed)
    length = count // blocks
    steps = np.diff(added[: length * blocks].reshape(blocks, length).mean(axis=1))
    error = max(error, math.sqrt(blocks / 2) * float(steps.std(ddof=1)))
    return Error(error, blocks - 2, independent, True, of_speed)


def error_of_series(series: np.ndarray) -> Error:
    """Of the mean of values of one run in the order of time, whose dependence has any form: [samples]."""
    count, blocks = len(series), min(BLOCKS, len(series))
    if count < 2:
        return Error(math.nan, 1.0, 1.0, False)
    means = np.array([part.mean() for part in np.array_split(series, blocks)])
    own_time, is_long = first_order_time(series), initial_sequence_time(series) > SHORT * count / blocks
    time = first_order_time(means) if is_long else 1.0  # independent means, too, look dependent at times
    error = max(
        float(means.std(ddof=1)) * math.sqrt(time / blocks), float(series.std(ddof=1)) * math.sqrt(own_time / count)
    )
    walks = blocks > 3 and (time > WALKS or (count > BLOCKS and count / own_time < FEWEST_INDEPENDENT))
    if not walks:
        return Error(error, max(blocks / time - 1, 1.0), blocks / time, False)
    error = max(error, math.sqrt(blocks / 2) * float(np.diff(means).std(ddof=1)))
    return Error(error, blocks - 2, min(blocks / time, count / own_time), True)


def series_evidence(a: np.ndarray, b: np.ndarray, metric: Metric) -> Evidence:
    """From one run a side: samples in the order of time."""
    found = [statistic(side, metric) for side in (a, b)]
    errors = [_error_of(side, metric, mean) for side, mean in zip((a, b), found, strict=True)]
    error, degrees = _of_both([each.error for each in errors], errors)
    return Evidence(
        a=found[0], b=found[1], effect=float(worsening(*(np.array(value) for value in found), metric)), error=error,
        degrees=max(degrees, 1.0), paired=False, clusters=max(1, int(sum(each.independent for each in errors))),
        remembers=any(each.remembers for each in errors),
    )  # fmt: skip


def _error_of(values: np.ndarray, metric: Metric, mean: float) -> Error:
    """Of the logarithm of the statistic. A quantile goes where the level goes: it is no surer than a drifting level."""
    error = error_of_series(_influence(values, metric, mean))
    error = error._replace(error=_moved(values, metric, error.error))
    if metric.statistic != "mean":
        level = error_of_series(np.log(np.maximum(values, LEAST)))
        if level.remembers and not error.error > level.error:
            return level
    return error


def requests_evidence(a: RunSamples, b: RunSamples, metric: Metric, paired: bool) -> Evidence | str:
    """From one run a side, request by request where both are `paired`; or why there is none."""
    values = [_values(side, metric) for side in (a, b)]
    known = [~np.isnan(side) for side in values]
    if not all(side.any() for side in known):
        return f"{'B' if known[0].any() else 'A'} has no such value"
    found = [statistic(samples_of(side, metric, 1), metric) for side in (a, b)]
    means = [float(np.mean(found))] * 2 if metric.what in SHARES else found  # of few good ones the share is unsure
    added = [_influence(side, metric, mean) for side, mean in zip(values, means, strict=True)]
    weighed = _of_pairs if paired else _of_two
    moved, degrees, errors = weighed(values, added, [queue_of(side) for side in (a, b)], metric)
    return Evidence(
        a=found[0], b=found[1], effect=float(worsening(*(np.array(value) for value in found), metric)),
        error=math.hypot(moved, *(each.of_speed for each in errors)), degrees=max(degrees, 1.0), paired=paired,
        clusters=max(1, int(sum(each.independent for each in errors))),
        remembers=any(each.remembers for each in errors),
    )  # fmt: skip


def _of_pairs(
    values: Sequence[np.ndarray], added: Sequence[np.ndarray], queues: Sequence[Queue], metric: Metric
) -> tuple[float, float, list[Error]]:
    """The standard error of the logarithm of the ratio, its degrees of freedom, and what they are of."""
    share = min(float((~np.isnan(side)).mean()) for side in values)
    found = error_of_mean(added[1] - added[0], queues, metric.what)
    return max(_moved(side, metric, found.error / share) for side in values), found.degrees, [found]


def _of_two(
    values: Sequence[np.ndarray], added: Sequence[np.ndarray], queues: Sequence[Queue], metric: Metric
) -> tuple[float, float, list[Error]]:
    """The same of runs with arrivals of their own."""
    known = [~np.isnan(side) for side in values]
    errors = [
        error_of_mean(each[has], [queue._replace(levels=queue.levels[has])], metric.what)
        for each, has, queue in zip(added, known, queues, strict=True)
    ]
    moved = [_moved(each, metric, of.error) for each, of in zip(values, errors, strict=True)]
    return *_of_both(moved, errors), errors


def _of_both(moved: Sequence[float], errors: Sequence[Error]) -> tuple[float, float]:
    """Of two sides' errors the error of their difference, and its degrees of freedom (Welch, 1947)."""
    whole, parts = math.hypot(*moved), sum(error**4 / of.degrees for error, of in zip(moved, errors, strict=True))
    return whole, whole**4 / parts if parts > 0 else sum(each.degrees for each in errors)


def _values(side: RunSamples, metric: Metric) -> np.ndarray:
    """[requests] of a metric of requests. A failed one is NaN for a mean, and infinitely slow for a quantile."""
    values = side.requests[metric.what].astype("float64").to_numpy(copy=True)
    if metric.what not in SHARES:
        values[~side.requests.served.to_numpy(dtype=bool)] = math.inf if metric.statistic != "mean" else math.nan
    return values


def _influence(values: np.ndarray, metric: Metric, mean: float) -> np.ndarray:
    """[requests] what each adds to the statistic of its side: of a mean, to its logarithm around `mean`; of a quantile,
    to the share of values above it. 0 of a request without a value."""
    known = ~np.isnan(values)
    if metric.statistic == "mean":
        return np.where(known, values / max(mean, LEAST) - 1, 0.0)
    bound = np.quantile(values[known], QUANTILES[metric.statistic], method="inverted_cdf")
    return np.where(known, (values > bound) * 1.0, 0.0)


def _moved(values: np.ndarray, metric: Metric, error: float) -> float:
    """How far the logarithm of the statistic moves for that error of what is added; NaN where it meets a failed one."""
    if metric.statistic == "mean" or error == 0:
        return error
    ordered = np.sort(values[~np.isnan(values)])
    share, least = QUANTILES[metric.statistic], 1 / len(ordered)
    low, high = max(share - error, least), min(share + error, 1 - least)
    if not high > low:
        return math.nan
    between = np.log(np.maximum(np.quantile(ordered, (low, high), method="inverted_cdf"), LEAST))
    return float(between[1] - between[0]) * error / (high - low) if np.isfinite(between).all() else math.nan


def first_order_time(series: np.ndarray) -> float:
    """Requests, of a first-order autoregression; 1 where neighbours are independent."""
    if not float(np.ptp(series)) > 0:
        return 1.0
    off, count = series - series.mean(), len(series)
    neighbours = float(off[1:] @ off[:-1]) / float(off @ off)
    neighbours = min(1 - 1 / count, max(0.0, neighbours + (1 + 3 * neighbours) / count))
    return (1 + neighbours) / (1 - neighbours)
