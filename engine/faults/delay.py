"""How a planted fault costs time, and when it acts."""

import time
from collections.abc import Callable
from typing import Any

from sojourn.engine.faults.plan import Fault, Way

SECOND_NS = 1_000_000_000


class Window:
    """The time in which a fault acts. It is counted from the first call of `is_open`."""

    def __init__(self, fault: Fault, clock: Callable[[], int] = time.monotonic_ns):
        self._from_ns = round(fault.from_s * SECOND_NS)
        self._until_ns = None if fault.until_s is None else round(fault.until_s * SECOND_NS)
        self._clock = clock
        self._first_ns: int | None = None

    def elapsed_ns(self) -> int:
        """Since the first request."""
        now_ns = self._clock()
        if self._first_ns is None:
            self._first_ns = now_ns
        return now_ns - self._first_ns

    def is_open(self) -> bool:
        elapsed_ns = self.elapsed_ns()
        return elapsed_ns >= self._from_ns and (self._until_ns is None or elapsed_ns < self._until_ns)


def spend(seconds: float, by: Way) -> None:
    """Holds this thread for so long: working, or asleep."""
    if seconds <= 0:
        return
    if by == "sleep":
        time.sleep(seconds)
        return
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


def before(function: Callable[..., Any], cost: Callable[..., None]) -> Callable[..., Any]:
    """The same function, which first costs what `cost` does with its arguments."""

    def call(*arguments: Any, **named: Any) -> Any:
        cost(*arguments, **named)
        return function(*arguments, **named)

    return call


def after(function: Callable[..., Any], cost: Callable[..., None]) -> Callable[..., Any]:
    """The same function, which at last costs what `cost` does with its result."""

    def call(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        cost(result)
        return result

    return call
