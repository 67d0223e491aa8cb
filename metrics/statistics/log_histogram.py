"""Counts of positive numbers in bins whose width grows with the number: bounded memory, and a known error.

Below 64 each whole number has a bin of its own. From there each octave has 64 bins, so a quantile is off by at most
0.8% (half of a bin).
"""

import math
from collections.abc import Iterable

import numpy as np

BINS = 64  # of an octave
ERROR = 0.5 / BINS  # of a quantile, relative


class LogHistogram:
    """Sparse: a few hundred bins, whatever it counts."""

    def __init__(self, values: Iterable[int] = ()):
        self.count = 0
        self.total = 0.0
        self._bins: dict[int, int] = {}
        for value in values:
            self.add(value)

    def add(self, value: int, times: int = 1) -> None:
        at = _bin(max(int(value), 0))
        self._bins[at] = self._bins.get(at, 0) + times
        self.count += times
        self.total += times * value

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, share: float) -> float | None:
        """The number below or at which this share of what was counted lies; None of nothing."""
        if not self.count:
            return None
        rank, seen = math.ceil(share * self.count), 0
        for at in sorted(self._bins):
            seen += self._bins[at]
            if seen >= rank:
                return _middle(at)
        return _middle(max(self._bins))

    def below(self, bound: float) -> int:
        """How many were less than a bound; of the bin in which it lies, a part."""
        whole = 0
        for at, times in self._bins.items():
            low, high = _edges(at)
            if high <= bound:
                whole += times
            elif low < bound:
                whole += round(times * (bound - low) / (high - low))
        return whole

    def distribution(self) -> tuple[np.ndarray, np.ndarray]:
        """(numbers, how many lie in the bin of each), ascending."""
        places = sorted(self._bins)
        return np.array([_middle(at) for at in places]), np.array([self._bins[at] for at in places])


class ExactHistogram(LogHistogram):
    """Keeps the numbers, too: for records that end."""

    def __init__(self) -> None:
        self.values: list[int] = []
        super().__init__()

    def add(self, value: int, times: int = 1) -> None:
        super().add(value, times)
        self.values.extend([value] * times)


def _bin(value: int) -> int:
    if value < BINS:
        return value
    octave = value.bit_length() - BINS.bit_length() + 1  # from 1 on
    return octave * BINS + (value >> octave - 1) - BINS if octave > 1 else value


def _edges(at: int) -> tuple[float, float]:
    """The least number of a bin, and of the next one."""
    if at < 2 * BINS:
        return at, at + 1
    octave, place = divmod(at, BINS)
    width = 1 << octave - 1
    return (BINS + place) * width, (BINS + place + 1) * width


def _middle(at: int) -> float:
    low, high = _edges(at)
    return (low + high - 1) / 2
