"""Draws of pauses, patience and turns. One draw of the generator each, so that nothing shifts by a distribution."""

import math

import numpy as np

from loadgen.scenario.durations import Seconds, Turns
from loadgen.schedule.quantile import normal_quantile

NS_PER_S = 1_000_000_000


def draw_ns(seconds: Seconds, rng: np.random.Generator) -> int:
    """A time in nanoseconds."""
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
    """The longest time that can be drawn."""
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
