"""Bounds of a predicted figure. Pure functions."""

import math

from sojourn.metrics.prediction import Interval, Prediction


def both_errors(median: float, one: float, other: float) -> float:
    """The bound, on the side of the median where `one` is, of two independent errors whose bounds these are."""
    if median <= 0 or one <= 0 or other <= 0:
        return min(one, other) if one < median else max(one, other)
    size = math.hypot(math.log(one / median), math.log(other / median))
    return median * math.exp(-size if min(one, other) < median else size)


def interval_named(prediction: Prediction, name: str) -> Interval | None:
    """The interval of a figure, by its name in `figures`; None of one that has none, such as the tokens per second."""
    group, _, part = name.partition(":")
    if group == "attainment" and part:
        return prediction.attainment_by_class.get(part)
    found = getattr(prediction, group, None)
    found = found.get(part) if isinstance(found, dict) else found
    return found if isinstance(found, Interval) else None
