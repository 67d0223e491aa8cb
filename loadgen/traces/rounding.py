"""Whether the times of a trace were rounded, told while it is walked: nothing of it is kept."""

import math
from dataclasses import dataclass, field

MICROSECONDS = 1_000_000
SHORTEST_BIN_S = 0.01  # times in milliseconds are a clock's resolution, not a bin
FEWEST_STAMPS = 8  # fewer gaps have a common divisor by chance


@dataclass(slots=True)
class Rounding:
    """The common divisor of all gaps between the times that it was given.

    It cannot tell a trace that was rounded from one whose requests really came at such moments.
    """

    _first_us: int | None = None
    _divisor_us: int = 0
    _stamps: set[int] = field(default_factory=set)  # some of those that differ

    def add(self, time_s: float) -> None:
        stamp_us = round(time_s * MICROSECONDS)
        self._first_us = stamp_us if self._first_us is None else self._first_us
        self._divisor_us = math.gcd(self._divisor_us, stamp_us - self._first_us)
        if len(self._stamps) < FEWEST_STAMPS:
            self._stamps.add(stamp_us)

    @property
    def bin_s(self) -> float | None:
        """The largest number of seconds that all gaps are multiples of, if it is long enough and seen often enough."""
        found_s = self._divisor_us / MICROSECONDS
        return found_s if len(self._stamps) == FEWEST_STAMPS and found_s >= SHORTEST_BIN_S else None
