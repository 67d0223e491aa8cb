"""When the front's event loop was busy: each turn of it that kept everybody else waiting, with its begin and its end.

A loop that runs callbacks accepts no connection, reads no request and hands over no token. The lag of a timer
(loop_lag.py) says how late the loop is; the turns say when, so that the waiting of a request can be booked to them.
"""

import asyncio
import selectors
import time
from collections.abc import Callable

from sojourn.metrics.ledger import CLOSURE_NS

TURN_NS = CLOSURE_NS  # of shorter turns no single one breaks the closure of a ledger; they count in `busy_ns`
ROUNDED_NS = 1_000_000  # epoll sleeps whole milliseconds


class LoopWatch:
    """The long turns of one event loop since the last `take`, and the time of all turns since it began.

    Two clock readings a turn. A turn lasts from the selector's return to its next call. It also begins early where the
    selector returns later than it was asked to: another thread held the interpreter, or no core was free. What this
    cannot tell: who held it.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.monotonic_ns):
        self.busy_ns = 0
        self._clock_ns = clock_ns
        self._begin_ns: int | None = None  # of the turn under way
        self._turns: list[tuple[int, int]] = []

    def new_event_loop(self) -> asyncio.SelectorEventLoop:
        """An event loop whose turns are watched."""
        return asyncio.SelectorEventLoop(_WatchedSelector(self))

    def wait_begins(self) -> int:
        """The loop has run its callbacks and asks for events. Returns when."""
        now_ns = self._clock_ns()
        if self._begin_ns is not None:
            lasted_ns = now_ns - self._begin_ns
            self.busy_ns += lasted_ns
            if lasted_ns >= TURN_NS:
                self._turns.append((self._begin_ns, lasted_ns))
        return now_ns

    def wait_ends(self, due_ns: int | None) -> None:
        """The loop has its events. `due_ns`: when it wanted to go on at the latest, None for whenever one comes."""
        now_ns = self._clock_ns()
        self._begin_ns = due_ns if due_ns is not None and now_ns - due_ns >= TURN_NS else now_ns

    def take(self) -> dict[str, list[int] | int]:
        """Fields of a SystemRecord. A turn under way is in the next sample."""
        turns, self._turns = self._turns, []
        return {
            "loop_turn_begin_ns": [begin_ns for begin_ns, _ in turns],
            "loop_turn_ns": [lasted_ns for _, lasted_ns in turns],
            "loop_busy_ns": self.busy_ns,
        }


class _WatchedSelector(selectors.DefaultSelector):
    """The system's best selector, which tells a LoopWatch when the loop waits."""

    def __init__(self, watch: LoopWatch):
        super().__init__()
        self._watch = watch

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        began_ns = self._watch.wait_begins()
        events = super().select(timeout)
        self._watch.wait_ends(None if timeout is None else began_ns + round(max(0.0, timeout) * 1e9) + ROUNDED_NS)
        return events
