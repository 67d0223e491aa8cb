"""The front's side of a core that sleeps: what it asks, and how long that took."""

import asyncio
import time
from collections.abc import Callable

from sojourn.engine import messages
from sojourn.engine.server.errors import core_lost


class Sleep:
    """One question at a time: the caller sees to that, and that the core is up and has no request."""

    def __init__(self, send: Callable[[bytes], None], set_state: Callable[[str], None]):
        self._send, self._set_state = send, set_state
        self._answer: asyncio.Future[messages.Slept | messages.Woken] | None = None
        self.wake_seconds: float | None = None  # that the last wake took

    async def begin(self) -> messages.Slept:
        """Lets the core give its memory back. Raises ApiError if it dies."""
        self._set_state("falling_asleep")
        slept = await self._asked(messages.Sleep())
        self._set_state("sleeping")
        return slept

    async def end(self) -> None:
        """Lets the core take it again. Raises ApiError if it dies."""
        began = time.monotonic()
        self._set_state("waking")
        await self._asked(messages.Wake())
        self.wake_seconds = time.monotonic() - began
        self._set_state("ready")

    def answered(self, message: messages.Slept | messages.Woken) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(message)

    def lost(self, state: str) -> None:
        """The core is dead."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(core_lost(state))

    async def _asked(self, question: messages.Sleep | messages.Wake) -> messages.Slept | messages.Woken:
        self._answer = asyncio.get_running_loop().create_future()
        self._send(messages.encode(question))
        return await self._answer
