"""How fast the core's queue empties, for the time that a refused client should wait."""

import math
import time
from collections import deque
from collections.abc import Callable

REMEMBERED_ADMISSIONS = 64
LONGEST_RETRY_SECONDS = 60


class QueueSpeed:
    """How fast the queue empties. Admissions without a queue say nothing about that, and are not counted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._times: deque[float] = deque(maxlen=REMEMBERED_ADMISSIONS + 1)  # the first one is the begin of the count

    def observe(self, num_admitted: int, *, queue_stands: bool) -> None:
        """After each step: the number of admissions, and whether others still wait."""
        now = self._clock()
        if not queue_stands:
            self._times.clear()
        elif not self._times:
            self._times.append(now)
        else:
            self._times.extend([now] * num_admitted)

    def seconds_to_clear(self, num_waiting: int) -> int:
        """At the speed of the last admissions, or of one until now; between 1 and 60."""
        if not self._times:
            return 1
        elapsed = self._clock() - self._times[0]
        return max(1, min(LONGEST_RETRY_SECONDS, math.ceil(num_waiting * elapsed / max(1, len(self._times) - 1))))
