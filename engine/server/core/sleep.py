"""The front's side of a core that sleeps: what it asks, and how long that took."""

import time
from collections.abc import Callable

from sojourn.engine import messages
from sojourn.engine.server.core.questions import SLEEP, Questions


class Sleep:
    """One question at a time: the caller sees to that, and that the core is up and has no request."""

    def __init__(self, questions: Questions, set_state: Callable[[str], None]):
        self._questions, self._set_state = questions, set_state
        self.wake_seconds: float | None = None  # that the last wake took

    async def begin(self) -> None:
        """Lets the core give its memory back. Raises ApiError if it dies."""
        self._set_state("falling_asleep")
        await self._questions.ask(SLEEP, messages.Sleep())
        self._set_state("sleeping")

    async def end(self) -> None:
        """Lets the core take it again. Raises ApiError if it dies."""
        began = time.monotonic()
        self._set_state("waking")
        await self._questions.ask(SLEEP, messages.Wake())
        self.wake_seconds = time.monotonic() - began
        self._set_state("ready")
