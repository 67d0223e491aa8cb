"""The calls of one tenant: how many are open, and who waits, in order of arrival."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from sojourn.engine.server.gateway.access.rate_limits import Limited
from sojourn.engine.server.gateway.access.rules import Tier

LONGEST_SLEEP_SECONDS = 1.0  # another front may have given something back
Attempt = Callable[[], Awaitable[Limited | None]]


class Line:
    """A queue before one limit. Nobody overtakes, and only the first one asks again."""

    def __init__(self) -> None:
        self.waiting = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def pass_through(self, tier: Tier, attempt: Attempt) -> Limited | None:
        """Returns when an attempt has succeeded, or the limit in the way where the tier does not wait (any longer)."""
        limited = None
        if not self.waiting or tier.on_limit == "reject":
            limited = await attempt()
            if limited is None or tier.on_limit == "reject" or limited.wait_seconds is None:
                return limited
        if self.waiting >= tier.queue_size:
            return Limited("queue_size", "queue_full", limited.wait_seconds if limited is not None else 1.0)
        return await self._wait(tier, attempt)

    async def _wait(self, tier: Tier, attempt: Attempt) -> Limited | None:
        self.waiting += 1
        try:
            async with asyncio.timeout(tier.queue_seconds), self._turn:
                while (limited := await attempt()) is not None:
                    if limited.wait_seconds is None:
                        return limited
                    self._freed.clear()
                    sleep = min(max(limited.wait_seconds, 0.001), LONGEST_SLEEP_SECONDS)
                    with contextlib.suppress(TimeoutError):
                        # Not wait_for: in Python 3.11 it loses a cancellation that comes together with a `wake`, and a
                        # client that left would take the place that was given back.
                        async with asyncio.timeout(sleep):
                            await self._freed.wait()
        except TimeoutError:
            return Limited("queue_seconds", "queue_timeout", 1.0)
        finally:
            self.waiting -= 1
        return None

    def wake(self) -> None:
        """Something was given back."""
        self._freed.set()


class Gate:
    """Two lines: before the limits of requests, and, once the prompt is encoded, before those of tokens."""

    def __init__(self) -> None:
        self.open = 0  # calls that have a place
        self.requests = Line()
        self.tokens = Line()

    async def enter(self, tier: Tier, count: Attempt) -> Limited | None:
        """Takes a place; `count` then counts the request. Without a limit in the way the caller owes a `leave`."""

        async def attempt() -> Limited | None:
            if tier.concurrency is not None and self.open >= tier.concurrency:
                return Limited("concurrency", "concurrency", 1.0)
            self.open += 1
            limited = None
            try:
                limited = await count()
                return limited
            except BaseException:
                self.open -= 1
                raise
            finally:
                if limited is not None:
                    self.open -= 1

        return await self.requests.pass_through(tier, attempt)

    def leave(self) -> None:
        self.open -= 1
        self.requests.wake()
