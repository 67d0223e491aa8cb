"""Draws of lengths, times and numbers of turns, each by inversion of one uniform number.

Every draw takes exactly one number of its generator, whatever the distribution, so that the draws behind it stay.
"""

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.scenario.distributions import Length, Seconds, Turns
from sojourn.loadgen.traces.reader import find_trace, read_trace

NS_PER_S = 1_000_000_000
_STANDARD_NORMAL = NormalDist()


def normal_quantile(probability: float) -> float:
    """The value below which a standard normal lies with this probability; 0 and 1 are moved inside by 1e-12."""
    return _STANDARD_NORMAL.inv_cdf(min(max(probability, 1e-12), 1 - 1e-12))


def draw_length(length: Length, traced: int | None, rng: np.random.Generator, field: str = "prompt_tokens") -> int:
    """A number of tokens within the bounds.

    `traced` is the length of the trace's row, if any; `field` names the lengths of a file for an empirical one.
    """
    low, high = length.bounds
    draw = rng.random()
    kind = length.distribution
    if kind == "fixed":
        return length.tokens
    if kind in ("uniform", "around"):
        return low + int(draw * (high - low + 1))
    if kind == "lognormal":
        value = length.median_tokens * float(np.exp(length.sigma * normal_quantile(draw)))
    elif kind == "normal":
        value = length.mean_tokens + length.stddev_tokens * normal_quantile(draw)
    elif kind == "zipf":
        value = low + int(np.searchsorted(_zipf_table(length.exponent, high - low + 1), draw, "right"))
    elif kind == "empirical":
        value = _empirical(length, field, draw)
    else:
        # A warm-up request comes from no row of the trace: it takes the lower bound.
        value = traced * length.scale if traced is not None else low
    return int(min(max(round(value), low), high))


@lru_cache(maxsize=64)
def _zipf_table(exponent: float, size: int) -> np.ndarray:
    """[size] the probability of each rank and all before it; the last is 1."""
    cumulated = np.cumsum(np.arange(1, size + 1, dtype=np.float64) ** -exponent)
    return cumulated / cumulated[-1]


def _empirical(length, field: str, draw: float) -> int:
    if length.file is not None:
        lengths = _measured(length.file, field)
        return int(lengths[int(draw * len(lengths))])
    sizes = sorted(length.histogram)
    cumulated = np.cumsum([length.histogram[size] for size in sizes])
    return sizes[min(int(np.searchsorted(cumulated, draw * cumulated[-1], "right")), len(sizes) - 1)]


@lru_cache(maxsize=64)
def _measured(file: str, field: str) -> np.ndarray:
    """The lengths of a trace, shortest first. Raises ScenarioError where it tells none."""
    found = read_trace(find_trace(file))
    lengths = [value for row in found.rows if (value := getattr(row, field))]
    if not lengths:
        raise ScenarioError(f"{found.path.name} tells no {field}, so an empirical length cannot be drawn from it")
    return np.sort(np.array(lengths))


def draw_ns(seconds: Seconds, rng: np.random.Generator) -> int:
    draw = rng.random()
    if seconds.distribution == "fixed":
        value = seconds.seconds
    elif seconds.distribution == "uniform":
        value = seconds.min_s + draw * (seconds.max_s - seconds.min_s)
    elif seconds.distribution == "exponential":
        value = min(-seconds.mean_s * math.log1p(-draw), seconds.at_most_s)
    else:
        value = min(seconds.median_s * math.exp(seconds.sigma * normal_quantile(draw)), seconds.at_most_s)
    return round(value * NS_PER_S)


def most_s(seconds: Seconds) -> float:
    if seconds.distribution == "fixed":
        return seconds.seconds
    return seconds.max_s if seconds.distribution == "uniform" else seconds.at_most_s


def draw_turns(turns: Turns, rng: np.random.Generator) -> int:
    """How many requests a session has."""
    draw = rng.random()
    if turns.distribution == "fixed":
        return turns.turns
    if turns.distribution == "uniform":
        return turns.min_turns + int(draw * (turns.max_turns - turns.min_turns + 1))
    if turns.mean_turns == 1:
        return 1
    return min(1 + int(math.log1p(-draw) / math.log1p(-1 / turns.mean_turns)), turns.max_turns)
