"""The largest value of a load that is kept: probing, and a line through what was found.

A trial says more than whether its value is kept: its margin, how many times as slow the server could be until it is
not. The limit is where the margin is 1.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

STEP = 1.5  # of probing rates; whole numbers are doubled
MOST_TRIALS = 14
MOST_GUESSES = 3  # in a row that do not halve the bracket


class Tried(NamedTuple):
    """One trial."""

    value: float
    is_kept: bool
    margin: float  # NaN where it says nothing of the limit: a backlog ended it
    is_least: bool = False  # no more than one request at a time


@dataclass(slots=True)
class Bracket:
    """What is known of a limit. Values are whole numbers up to `most` where that is given."""

    most: int | None = None
    tried: list[Tried] = field(default_factory=list)  # in order of their values

    def add(self, tried: Tried) -> None:
        self.tried = sorted([*(each for each in self.tried if each.value != tried.value), tried])

    @property
    def missed(self) -> Tried | None:
        """The smallest that is not kept."""
        return next((each for each in self.tried if not each.is_kept), None)

    @property
    def kept(self) -> Tried | None:
        """The largest below it."""
        end = math.inf if self.missed is None else self.missed.value
        return next((each for each in reversed(self.tried) if each.value < end), None)

    @property
    def width(self) -> float:
        """Ratio of its ends."""
        return math.inf if self.kept is None or self.missed is None else self.missed.value / self.kept.value

    def is_found(self, tolerance: float) -> bool:
        kept, missed = self.kept, self.missed
        if kept is None or missed is None:
            return (missed is not None and missed.is_least) or (kept is not None and kept.value == self.most)
        whole = self.most is not None
        return self.width <= (1 + tolerance) * (1 + 1e-9) or (whole and missed.value - kept.value <= 1)

    def next(self, tolerance: float, *, by_line: bool) -> tuple[float, bool]:
        """The value to try, and whether it is of the line."""
        kept, missed, whole = self.kept, self.missed, self.most is not None
        stride = 2.0 if whole else STEP
        guess = self._on_line() if by_line else None
        if guess is not None:
            nearest = 1 + tolerance
            low = missed.value / stride**2 if kept is None else max(kept.value * nearest, kept.value + whole)
            high = kept.value * stride**2 if missed is None else min(missed.value / nearest, missed.value - whole)
            value = min(max(guess, low), high) if low <= high else math.sqrt(low * high)
        elif kept is None:
            value = missed.value / stride
        elif missed is None:
            value = kept.value * stride
        else:
            value = (kept.value + missed.value) / 2 if whole else math.sqrt(kept.value * missed.value)
        if self.most is not None:
            least, most = 1 if kept is None else kept.value + 1, self.most if missed is None else missed.value - 1
            value = float(min(max(round(value), least), most))
        return value, guess is not None

    def _on_line(self) -> float | None:
        """Where the margin is 1 by the two trials next to it. Of slots a step's time is nearly straight; of rates its
        inverse, since time grows without bound towards capacity."""
        known = [each for each in self.tried if 0 < each.margin < math.inf]
        known.sort(key=lambda each: abs(math.log(each.margin)))
        if len(known) < 2:
            return None
        (x0, y0), (x1, y1) = ((e.value, 1 / e.margin if self.most is not None else e.margin) for e in known[:2])
        found = x0 + (1 - y0) * (x1 - x0) / (y1 - y0) if y1 != y0 else math.nan
        low = 0.0 if self.kept is None else self.kept.value
        high = math.inf if self.missed is None else self.missed.value
        return found if low < found < high else None  # else the trials next to it are not of a line


def search(
    run: Callable[[float], Tried],
    start: float,
    tolerance: float,
    *,
    most: int | None = None,
    known: Iterable[Tried] = (),
) -> Bracket:
    """Tries until the limit is known within `tolerance`. `known` were tried before; then `start` is not needed."""
    bracket, failed = Bracket(most), 0
    for each in known:
        bracket.add(each)
    if not bracket.tried:
        bracket.add(run(start))
    for _ in range(MOST_TRIALS - 1):
        if bracket.is_found(tolerance):
            break
        width = bracket.width
        value, is_guess = bracket.next(tolerance, by_line=failed < MOST_GUESSES)
        bracket.add(run(value))
        halved = bracket.width < math.inf and bracket.width <= math.sqrt(width)
        failed = (0 if halved else failed + 1) if is_guess else min(failed, MOST_GUESSES - 1)
    return bracket
