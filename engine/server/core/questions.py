"""What the front asks of a core beside requests, and who waits for which answer."""

import asyncio
from collections.abc import Callable
from typing import Any

from sojourn.engine import messages
from sojourn.engine.server.errors import core_lost

BURST, SLEEP = "burst", "sleep"  # an adapter is asked for by its key


class Questions:
    """The answer to a name goes to all who asked by it. A core that dies answers none of them."""

    def __init__(self, send: Callable[[bytes], None]):
        self._send = send
        self._waiting: dict[str, list[asyncio.Future[Any]]] = {}

    async def ask(self, name: str, question: messages.ToCore) -> Any:
        """Raises ApiError if the core dies."""
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append(waiting)
        self._send(messages.encode(question))
        return await waiting

    def is_open(self, name: str) -> bool:
        return any(not waiting.done() for waiting in self._waiting.get(name, ()))

    def answer(self, name: str, answer: Any) -> None:
        for waiting in self._waiting.pop(name, ()):
            if not waiting.done():
                waiting.set_result(answer)

    def lose(self, state: str) -> None:
        """The core is dead."""
        for waiting in [each for futures in self._waiting.values() for each in futures if not each.done()]:
            waiting.set_exception(core_lost(state))
        self._waiting.clear()
