"""How fast the queue empties: what a client that finds it full is told."""

import math
import time
from collections import deque
from collections.abc import Callable

REMEMBERED = 64  # admissions
LONGEST_SECONDS = 60


class QueueSpeed:
    """Counts admissions while a queue stands. What was admitted without one says nothing about its speed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._times: deque[float] = deque(maxlen=REMEMBERED + 1)  # the first: since when the others are counted

    def observe(self, num_admitted: int, *, queue_stands: bool) -> None:
        """After each step: what was admitted, and whether others still wait."""
        now = self._clock()
        if not queue_stands:
            self._times.clear()
        elif not self._times:
            self._times.append(now)
        else:
            self._times.extend([now] * num_admitted)

    def reset(self) -> None:
        """The queue is gone, and what admitted it."""
        self._times.clear()

    def seconds_to_clear(self, num_waiting: int) -> int:
        """At the speed of the last admissions, or of one by now; between 1 and 60."""
        if not self._times:
            return 1
        elapsed = self._clock() - self._times[0]
        return max(1, min(LONGEST_SECONDS, math.ceil(num_waiting * elapsed / max(1, len(self._times) - 1))))
