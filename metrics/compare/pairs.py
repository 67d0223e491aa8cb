"""Two runs of one schedule compared request by request, where a run is too short for windows. Pure.

The statistic is that of the windows: the logarithm of B's mean (or quantile) over A's. Pairs lie in the order in which
they were due, and neighbours hang together: one queue makes a hundred of them slow. So whole blocks of pairs are
resampled, the same ones of both sides (the circular block bootstrap of Politis and Romano, 1992). A block has
BLOCK_TIMES correlation times, and there are at least FEWEST_BLOCKS blocks.

A short series looks more independent than it is: its autocorrelation is corrected for that (Kendall, 1954), and the
error is at least that of a first-order autoregression with it. Student's t has the degrees of freedom of the blocks, or
of as many independent pairs as the series is worth where these are fewer. What waits in a queue remembers as long as
the queue does: there the correlation time is at least that of both sides' latencies.

A queue that grows, or whose correlation time is longer than a block may be, remembers all of the run. It stretches the
small difference in speed that two runs of one system have, by 1 + (length of the run / latency at its end): it is
arrivals minus service. So USUAL_SPEED_SPREAD, stretched, is added to the error.

What it cannot see: a system that differs from run to run as a whole, and a correlation time of more than a quarter of
the run. `tests/metrics/compare/test_pairs.py` counts the wrong verdicts on pairs that do not differ.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sojourn.metrics.compare.metrics import QUANTILES, SHARES, Metric
from sojourn.metrics.compare.samples import SAME_DUE_NS, RunSamples, Samples, num_windows, same_schedule
from sojourn.metrics.compare.verdict import LEAST, RESAMPLES, Evidence, GoodPairs, statistic, weighted, worsening
from sojourn.metrics.statistics.dependent_samples import growing

FEWEST_PAIRS = 60
FEWEST_BLOCKS, BLOCK_TIMES = 4, 2.0
WITHOUT_QUEUE = ("tpot_ms",)
USUAL_SPEED_SPREAD = 0.03  # of a run on a machine that nobody else uses: docs/results/replay_accuracy.md measures it


class Latencies(NamedTuple):
    """Of both sides."""

    e2e_ms: Sequence[np.ndarray]  # [pairs] each
    stretch: float  # relative change of a latency for one of the server's speed, of a queue that remembers; else 0


class Blocks(NamedTuple):
    """How pairs are resampled."""

    length: int  # pairs of one block
    number: float
    error: float  # standard error of the mean of what the pairs add
    inflation: float  # of that over the one of the blocks alone
    of_speed: float  # standard error of the logarithm of the ratio, beside it: what such a queue makes of the speed
    degrees: float  # of freedom


def are_taken_by_pairs(a: RunSamples, b: RunSamples) -> bool:
    """Whether two single runs are compared by pairs: they sent the same schedule, and A is too short for windows. Of A
    alone: a B that is too slow for them is worse."""
    has_moments = len(a.requests) >= FEWEST_PAIRS and a.requests.due_ns.max() > a.begin_ns
    return bool(has_moments and same_schedule(a, b) and num_windows(a)[1])


def good_pairs(a: RunSamples, b: RunSamples) -> GoodPairs:
    """Of two runs of the same schedule. `attainment` weighs the same pairs."""
    first, second = (side.requests.good.to_numpy(dtype=bool) for side in (a, b))
    return GoodPairs(
        both=int((first & second).sum()), only_a=int((first & ~second).sum()), only_b=int((~first & second).sum()),
        neither=int((~first & ~second).sum()),
    )  # fmt: skip


def common_beginning(a: RunSamples, b: RunSamples) -> int:
    """How many requests from the first one both sent alike, at the same moments and of the same class, such that all
    had ended on both sides before one side sent a request that the other did not."""
    first, second = a.requests, b.requests
    count = min(len(first), len(second))
    due = [side.requests.due_ns.to_numpy(dtype="float64") - side.begin_ns for side in (a, b)]
    alike = np.abs(due[0][:count] - due[1][:count]) <= SAME_DUE_NS
    alike &= first.klass.to_numpy()[:count] == second.klass.to_numpy()[:count]
    count = count if alike.all() else int(alike.argmin())
    parted = min((side[count] for side in due if len(side) > count), default=math.inf)
    for side in (a, b):
        ends = side.requests.last_byte_ns.astype("float64").to_numpy()[:count] - side.begin_ns
        late = np.flatnonzero(~(ends <= parted))  # a request without an end may have been open to the last
        count = min(count, int(late[0]) if len(late) and math.isfinite(parted) else count)
    return count


def paired_values(side: RunSamples, metric: Metric) -> np.ndarray:
    """[requests] of a metric of requests. A failed one is NaN for a mean, and infinitely slow for a quantile."""
    values = side.requests[metric.what].astype("float64").to_numpy(copy=True)
    if metric.what not in SHARES:
        values[~side.requests.served.to_numpy(dtype=bool)] = math.inf if metric.statistic != "mean" else math.nan
    return values


def blocks_of(added: np.ndarray, latencies: Latencies, what: str) -> Blocks:
    """From what each pair adds to the difference of the two sides in `what`, [pairs]."""
    off, count = added - added.mean(), len(added)
    variance, is_queued = float(off @ off) / count, what not in WITHOUT_QUEUE
    of_speed = math.sqrt(2) * USUAL_SPEED_SPREAD * latencies.stretch if is_queued and latencies.stretch else 0.0
    if variance == 0:
        return Blocks(1, count, 0.0, 1.0, of_speed, count - 1)
    levels = [np.log(np.maximum(side, LEAST)) for side in latencies.e2e_ms]
    series = [off, levels[1] - levels[0], *levels] if is_queued and not latencies.stretch else [off]
    time = min(max(map(_correlation_time, series)), count / FEWEST_BLOCKS)
    length = min(max(math.ceil(BLOCK_TIMES * time), math.ceil(count ** (1 / 3))), count // FEWEST_BLOCKS)
    number, independent = count / length, count / time
    sums = np.cumsum(np.concatenate([[0.0], off, off[: length - 1]]))
    of_blocks = float(np.mean(((sums[length:] - sums[:-length]) / length) ** 2)) / number
    error = math.sqrt(max(of_blocks * number / (number - 1), variance / (independent - 1)))
    inflation = error / math.sqrt(of_blocks) if of_blocks > 0 else math.inf
    return Blocks(length, number, error, inflation, of_speed, min(number, independent) - 1)


def _correlation_time(series: np.ndarray) -> float:
    """Pairs, of a first-order autoregression; 1 where neighbours are independent."""
    off, count = series - series.mean(), len(series)
    if not (square := float(off @ off)) > 0:
        return 1.0
    neighbours = float(off[1:] @ off[:-1]) / square
    neighbours = min(1 - 1 / count, max(0.0, neighbours + (1 + 3 * neighbours) / count))
    return (1 + neighbours) / (1 - neighbours)


def latencies_of(a: RunSamples, b: RunSamples) -> Latencies:
    sides = []
    for side in (a, b):
        latency = side.requests.e2e_ms.astype("float64")
        sides.append(latency.fillna(latency.max()).fillna(0.0).to_numpy())  # one without was as slow as the slowest
    remember = [side for side in sides if growing(side)] or [
        side for side in sides if _correlation_time(np.log(np.maximum(side, LEAST))) > len(side) / FEWEST_BLOCKS
    ]
    due_ms = float(a.requests.due_ns.max() - a.begin_ns) / 1e6
    at_end = [float(np.median(side[-(len(side) // 3) :])) for side in remember]
    return Latencies(sides, max((1 + due_ms / max(ms, LEAST) for ms in at_end), default=0.0))


def influence(values: np.ndarray, metric: Metric, mean: float) -> np.ndarray:
    """[pairs] what each adds to the statistic of its side: of a mean, to its logarithm around `mean`; of a quantile, to
    the share of values above it. 0 of a pair without a value."""
    known = ~np.isnan(values)
    if metric.statistic == "mean":
        return np.where(known, values / max(mean, LEAST) - 1, 0.0)
    bound = np.quantile(values[known], QUANTILES[metric.statistic], method="inverted_cdf")
    return np.where(known, (values > bound) * 1.0, 0.0)


def block_weights(count: int, length: int, resamples: int, random: np.random.Generator) -> np.ndarray:
    """[resamples, pairs] how often each pair is drawn, in circular blocks; each row sums to about `count`."""
    starts = random.integers(0, count, (resamples, math.ceil(count / length)))
    rows = np.arange(resamples)[:, None]
    steps = np.zeros((resamples, count + length), dtype="int64")
    np.add.at(steps, (rows, starts), 1)
    np.add.at(steps, (rows, starts + length), -1)
    drawn = np.cumsum(steps, axis=1)
    drawn[:, :length] += drawn[:, count:]
    return drawn[:, :count]


def blocks_evidence(a: RunSamples, b: RunSamples, metric: Metric, random: np.random.Generator) -> Evidence | str:
    """From one run a side that sent the same schedule; or why there is none."""
    values = [paired_values(side, metric) for side in (a, b)]
    known = [~np.isnan(side) for side in values]
    if not all(side.any() for side in known):
        return f"{'B' if known[0].any() else 'A'} has no such value"
    count = len(values[0])
    samples = [Samples(side[has], np.flatnonzero(has), count) for side, has in zip(values, known, strict=True)]
    found = [statistic(side, metric) for side in samples]
    means = [float(np.mean(found))] * 2 if metric.what in SHARES else found  # of few good ones the share is unsure
    added = [influence(side, metric, mean) for side, mean in zip(values, means, strict=True)]
    blocks = blocks_of(added[1] - added[0], latencies_of(a, b), metric.what)
    error = blocks.error
    if metric.statistic != "mean":  # how far a quantile moves with the pairs, only resampling tells
        weights = block_weights(count, blocks.length, RESAMPLES, random)
        effects = worsening(*(weighted(side, metric, weights) for side in samples), metric)
        error = float(np.std(effects)) * blocks.inflation if np.isfinite(effects).all() else math.nan
    effect = float(worsening(*(np.array(value) for value in found), metric))
    error = math.hypot(error, blocks.of_speed)
    return Evidence(a=found[0], b=found[1], effect=effect, error=error, degrees=blocks.degrees, paired=True,
                    clusters=int(blocks.number))  # fmt: skip
