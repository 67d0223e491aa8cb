"""A thread that moves blocks beside the loop, and complaints that do not flood a log."""

import logging
import queue
import threading
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

LOG_EVERY_S = 60.0


class Worker:
    """One thread that runs tasks in their order. A task raises nothing."""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def close(self, timeout_s: float) -> bool:
        """Runs what is queued. False where the thread is still at it after that time."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class Complaints:
    """At most one sentence a minute and kind."""

    def __init__(self) -> None:
        self._logged_s: dict[str, float] = {}

    def log(self, kind: str, sentence: str, *values: object) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s.get(kind, -LOG_EVERY_S) >= LOG_EVERY_S:
            self._logged_s[kind] = now_s
            log.warning(sentence, *values)
