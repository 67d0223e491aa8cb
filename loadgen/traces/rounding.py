"""Whether the times of a trace were rounded, found while it is read, in bounded memory."""

from dataclasses import dataclass, field

import numpy as np

SHORTEST_BIN_S = 0.01  # times in milliseconds are a clock's resolution, not a bin
FEWEST_BINS = 8  # times in fewer fit some bin by chance
MOST_STAMPS = 1024  # the bin is found on so many; the others must fit it
MOST_PARTS = 40  # of the smallest gap: it need not be a single bin
# How far from its bin's begin a time may lie: a clock's jitter. Few random times fit bins so much longer.
JITTER_S, JITTER_SHARE = 0.005, 0.01


@dataclass(frozen=True, slots=True)
class Bins:
    """The bins that times were rounded to: `width_s` is None if they were not, or are too few to decide."""

    width_s: float | None = None
    begin_s: float = 0.0  # of some bin
    too_few: bool = False

    def begins_s(self, times_s: np.ndarray) -> np.ndarray:
        """The start of the bin of each time; a time may lie slightly before it."""
        return self.begin_s + np.round((times_s - self.begin_s) / self.width_s) * self.width_s

    def hold(self, times_s: np.ndarray) -> bool:
        jitter_s = np.abs(times_s - self.begins_s(times_s))
        return bool(np.all(jitter_s <= min(JITTER_S, JITTER_SHARE * self.width_s) + 1e-6))


@dataclass(slots=True)
class Rounding:
    """The longest bin with all times at its start, within a few milliseconds.

    It cannot distinguish a rounded trace from requests that really came at such moments.
    """

    _stamps: set[float] = field(default_factory=set)  # the first that differ
    _found: Bins | None = None  # once there are enough

    def add(self, time_s: float) -> None:
        if self._found is None:
            self._stamps.add(time_s)
            if len(self._stamps) == MOST_STAMPS:
                self._found = _find(self._stamps)
        elif self._found.width_s is not None and not self._found.hold(time_s):
            self._found = Bins()

    @property
    def bins(self) -> Bins:
        return self._found or _find(self._stamps)


def _find(stamps: set[float]) -> Bins:
    times_s = np.array(sorted(stamps))
    steps_s = np.diff(times_s)
    gaps_s = np.diff(times_s[np.concatenate([[True], steps_s > JITTER_S])]) if len(times_s) else steps_s
    if len(gaps_s) + 1 < FEWEST_BINS:
        return Bins(too_few=True)
    for parts in range(1, MOST_PARTS + 1):
        width_s = gaps_s.min() / parts
        near_s = gaps_s[gaps_s < 50 * width_s]  # over more bins the jitter of one gap adds up to a whole bin
        width_s = near_s.sum() / np.round(near_s / width_s).sum()
        for digits in (2, 3):  # a bin is a round number of seconds: what is left of the jitter goes
            width = round(float(width_s), digits)
            if width < SHORTEST_BIN_S:
                continue
            begin_s = float(np.median((times_s + width / 2) % width)) - width / 2
            bins = Bins(width, begin_s)
            if bins.hold(times_s):
                return bins
    return Bins()
