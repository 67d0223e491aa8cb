"""What one model was since the front began: its states, the memory that it held, and the calls that waited for it."""

import time
from collections.abc import Callable

from sojourn.metrics.memory.residence import GIB, ModelResidence, StateTime


class History:
    """Sums by state: a front that lives for months remembers no more than one that has just begun."""

    def __init__(self, name: str, state: str, clock_ns: Callable[[], int] = time.monotonic_ns):
        self._name, self._clock_ns = name, clock_ns
        self._states: dict[str, StateTime] = {}  # that are over
        self._state, self._held_bytes, self._since_ns = state, 0, clock_ns()
        self.num_waited = self.waited_ns = 0

    def note(self, state: str, held_bytes: int) -> bool:
        """The state of now; whether it is another one. What a model holds counts from the end of its change on."""
        if state == self._state:
            self._held_bytes = held_bytes
            return False
        now_ns = self._clock_ns()
        self._states[self._state] = self._sum_of_now(now_ns)
        self._state, self._held_bytes, self._since_ns = state, held_bytes, now_ns
        return True

    def add_wait(self, ns: int) -> None:
        self.num_waited += 1
        self.waited_ns += ns

    def residence(self, hot_bytes: int) -> ModelResidence:
        """All until now."""
        states = self._states | {self._state: self._sum_of_now(self._clock_ns())}
        return ModelResidence(self._name, list(states.values()), hot_bytes, self.num_waited, self.waited_ns)

    def _sum_of_now(self, now_ns: int) -> StateTime:
        """All times in the state of now."""
        before = self._states.get(self._state, StateTime(self._state, 0, 0.0, 0.0))
        seconds = (now_ns - self._since_ns) / 1e9
        held = before.held_gib_seconds + seconds * self._held_bytes / GIB
        return StateTime(self._state, before.count + 1, before.seconds + seconds, held)
