"""A figure with its 95% interval, as benchmarks print it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 2_000


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95% interval."""

    value: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.value:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def median_of(values: Sequence[float]) -> Estimate:
    """The median, with a percentile bootstrap interval (Efron, 1979). Its seed is fixed: the same values, the same
    interval."""
    resampled = np.random.default_rng(0).choice(values, size=(RESAMPLES, len(values)))
    low, high = np.percentile(np.median(resampled, axis=1), (2.5, 97.5))
    return Estimate(float(np.median(values)), float(low), float(high))
