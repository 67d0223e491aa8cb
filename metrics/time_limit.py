"""A limit in time that is passed down to whoever replays: a verdict is there when its reader waits for it."""

import time
from collections.abc import Callable

from sojourn.metrics.errors import ReplayError


class OutOfTime(ReplayError):
    """What was begun does not end within its time limit."""


class TimeLimit:
    """Begins when it is made. `clock` gives seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock, self._end = clock, clock() + seconds

    def left(self) -> float:
        """Seconds; below 0 once it is over."""
        return self._end - self._clock()

    def check(self) -> None:
        """Raises OutOfTime once it is over."""
        if self.left() < 0:
            raise OutOfTime(f"no replay fits into {self.seconds:g} s")
