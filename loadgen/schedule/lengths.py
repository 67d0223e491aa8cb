"""Draws of lengths in tokens, each by inversion of one uniform number."""

from functools import lru_cache

import numpy as np

from loadgen.scenario.faults import ScenarioError
from loadgen.schedule.quantile import normal_quantile
from loadgen.traces.reader import find_trace, read_trace


def draw_length(length, traced: int | None, rng: np.random.Generator, field: str = "prompt_tokens") -> int:
    """A number of tokens within the bounds. Draws once whatever the distribution, so that classes do not shift.

    `traced` is the length of the trace's row, if any; `field` says which lengths of a file an empirical one takes.
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
        raise ScenarioError([f"{found.path.name} tells no {field}, so an empirical length cannot be drawn from it"])
    return np.sort(np.array(lengths))
