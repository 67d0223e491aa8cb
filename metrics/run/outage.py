"""One log line when writing begins to fail, and one when it works again."""

import logging
import time
from collections.abc import Callable

SETTLED_SECONDS = 5.0  # without a failure: a disk that is nearly full refuses some writes and takes others


class WriteOutage:
    """Owns whether a writer is failing now. `works` is the sentence of its recovery, without a full stop."""

    def __init__(self, log: logging.Logger, works: str, clock: Callable[[], float] = time.monotonic):
        self._log, self._works, self._clock = log, works, clock
        self._failed_at: float | None = None  # seconds; None while writes succeed

    def begin(self, sentence: str) -> None:
        """A write failed. Only the first one of an outage is logged."""
        if self._failed_at is None:
            self._log.warning("%s", sentence)
        self._failed_at = self._clock()

    def end(self, outcome: str = "") -> None:
        """No write fails. Logged once, SETTLED_SECONDS after the last failure."""
        if self._failed_at is not None and self._clock() - self._failed_at >= SETTLED_SECONDS:
            self._failed_at = None
            self._log.warning("%s again%s", self._works, f"; {outcome}" if outcome else "")
