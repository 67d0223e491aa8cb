"""What one model was since the front began: its states, the memory that it held, and the calls that waited for it."""

import time
from collections.abc import Callable

from metrics.memory.residence import ModelResidence, ResidenceSpan


class History:
    """Remembers a span for each change of state."""

    def __init__(self, name: str, state: str, clock_ns: Callable[[], int] = time.monotonic_ns):
        self._name, self._clock_ns = name, clock_ns
        self._spans: list[ResidenceSpan] = []
        self._state, self._held_bytes, self._since_ns = state, 0, clock_ns()
        self.num_waited = self.waited_ns = 0

    def note(self, state: str, held_bytes: int) -> bool:
        """The state of now; whether it is another one. What a model holds counts from the end of its change on."""
        if state == self._state:
            self._held_bytes = held_bytes
            return False
        now_ns = self._clock_ns()
        self._spans.append(ResidenceSpan(self._state, self._since_ns, now_ns, self._held_bytes))
        self._state, self._held_bytes, self._since_ns = state, held_bytes, now_ns
        return True

    def waited(self, ns: int) -> None:
        self.num_waited += 1
        self.waited_ns += ns

    def residence(self, hot_bytes: int) -> ModelResidence:
        """All until now."""
        last = ResidenceSpan(self._state, self._since_ns, self._clock_ns(), self._held_bytes)
        return ModelResidence(self._name, [*self._spans, last], hot_bytes, self.num_waited, self.waited_ns)
