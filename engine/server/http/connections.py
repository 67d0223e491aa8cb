"""All open connections: how many there may be, which of them are overdue, and how many were closed for what."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from starlette.types import Receive

from sojourn.engine.config import EngineConfig
from sojourn.metrics.catalog.request import CLOSED_CONNECTIONS

SWEEP_SECONDS = 0.5


class Connection(Protocol):
    """A connection, as `Connections` sees it."""

    has_head: bool  # a head has begun and is not complete

    def close_overdue(self, now: float) -> None:
        """Closes the connection if one of its deadlines is over."""

    def close_idle(self, reason: str) -> None:
        """Closes a connection without a request."""


class Connections:
    """The connections of one server. All times are seconds of `clock`."""

    def __init__(self, config: EngineConfig, clock: Callable[[], float] = time.monotonic):
        self.config = config
        self.clock = clock
        self.open: set[Connection] = set()
        self.closed = dict.fromkeys(CLOSED_CONNECTIONS, 0)  # by the server, for a reason → how many
        self.limit = config.max_connections
        self._idle: dict[Connection, None] = {}  # without a whole head, the longest first

    def add(self, connection: Connection) -> bool:
        """Takes a new connection. Where there are too many, one without a request makes room; False if none can."""
        if len(self.open) >= self.limit:
            # A head that is on its way counts more than a connection that is only kept.
            victim = next((idle for idle in self._idle if not idle.has_head), None) or next(iter(self._idle), None)
            if victim is None:
                self.count("no_room")
                return False
            self.discard(victim)
            victim.close_idle("displaced")
        self.open.add(connection)
        self._idle[connection] = None
        return True

    def discard(self, connection: Connection) -> None:
        self.open.discard(connection)
        self._idle.pop(connection, None)

    def begin_request(self, connection: Connection) -> None:
        """A head is complete: the connection is not closed for others."""
        self._idle.pop(connection, None)

    def end_request(self, connection: Connection) -> None:
        if connection in self.open:
            self._idle[connection] = None

    def count(self, reason: str) -> None:
        self.closed[reason] += 1

    def close_overdue(self) -> None:
        now = self.clock()
        for connection in list(self.open):
            connection.close_overdue(now)

    async def watch(self) -> None:
        """Closes what is overdue, until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.close_overdue()


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
