"""Writes the events of a process while it sends, beside the loop that stamps them."""

import logging
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

import gevent
import gevent.event
import pyarrow as pa

from sojourn.loadgen.client import event_log
from sojourn.loadgen.client.socket_loop import SocketLoop
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.outage import WriteOutage

logger = logging.getLogger(__name__)


class EventWriter:
    """Owns the logs that are full and not written yet."""

    def __init__(
        self, run_dir: Path, shift_ns: int = 0, *, before: Callable[[], None] = lambda: None,
        after: Callable[[], None] = lambda: None,
    ):  # fmt: skip
        """`shift_ns` as in `Replay`; `before` and `after` run with each flush, in its native thread."""
        self._run_dir, self._shift_ns, self._before, self._after = run_dir, shift_ns, before, after
        self._full: deque[event_log.EventLog] = deque()
        self._folder = run_dir.stat()
        self._outage = WriteOutage(logger, f"events are written to {run_dir}")
        self._num_written = 0
        self._next_swap_ns = 0

    def swap(self, loop: SocketLoop, now_ns: int) -> None:
        """In the loop's thread: hands its log over for writing."""
        if now_ns >= self._next_swap_ns:
            self._next_swap_ns = now_ns + int(event_log.FLUSH_SECONDS * 1e9)
            self._full.append(loop.log)
            loop.log = event_log.EventLog()

    def write_until(self, closing: gevent.event.Event) -> None:
        threadpool = gevent.get_hub().threadpool
        while not closing.wait(event_log.FLUSH_SECONDS):
            if (fault := threadpool.apply(self._fault_of_a_flush)) is None:
                self._outage.end()
            else:
                self._outage.begin(f"events stay in memory, as {self._run_dir} does not take them: {fault}")

    def write_the_rest(self, last: event_log.EventLog) -> None:
        """After the loop has ended. Raises RunDataError where it cannot."""
        self._full.append(last)
        try:
            self._flush()
        except (OSError, pa.ArrowException) as error:
            lost = sum(map(len, self._full))
            raise RunDataError(
                f"the last {lost:,} events cannot be written to {self._run_dir} ({error}); those before them remain"
            ) from None

    def _fault_of_a_flush(self) -> Exception | None:
        """Not raised: gevent would print a traceback of the thread."""
        try:
            self._flush()
        except (OSError, pa.ArrowException) as error:
            return error
        return None

    def _flush(self) -> None:
        """Writes the full logs, one segment each. A log that cannot be written stays first in the queue."""
        if not os.path.samestat(self._folder, self._run_dir.stat()):
            raise FileNotFoundError("its folder was removed")  # in a new one, nobody would find the schedule
        self._before()
        while self._full:
            events = self._full[0]
            if len(events):
                event_log.write_events(self._run_dir, events, self._num_written, self._shift_ns)
                self._num_written += len(events)
            self._full.popleft()
        self._after()
