"""The counters of requests and tokens, by the library `limits`: in this process, or in Redis for several fronts.

Requests are counted in a moving window, which is exact. Tokens are counted in a sliding window, which is the sum of
this minute and a share of the one before: it takes one number where a moving window would take one for each token.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from limits import RateLimitItem, RateLimitItemPerMinute, RateLimitItemPerSecond
from limits.aio.storage import MemoryStorage
from limits.aio.strategies import MovingWindowRateLimiter, SlidingWindowCounterRateLimiter
from limits.storage import storage_from_string

from sojourn.engine.server.errors import Rejection
from sojourn.engine.server.gateway.access.rules import AccessFile, Tier

log = logging.getLogger(__name__)
REQUEST_WINDOWS = {"requests_per_second": RateLimitItemPerSecond, "requests_per_minute": RateLimitItemPerMinute}
TOKEN_WINDOWS = ("tokens_per_minute", "input_tokens_per_minute", "output_tokens_per_minute")
STORAGE_SECONDS = 0.5  # the longest wait for the storage
RETRY_STORAGE_SECONDS = 1.0  # after a failure nobody asks it for so long
FORCED = 2**62  # a limit that books whatever was used
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Tokens:
    input: int
    output: int

    def of(self, setting: str) -> int:
        """What counts for one of TOKEN_WINDOWS."""
        counted = {"tokens_per_minute": self.input + self.output, "input_tokens_per_minute": self.input}
        return counted.get(setting, self.output)


@dataclass(frozen=True, slots=True)
class Limited:
    """A limit without room, and the seconds until it may have some; None: it never will."""

    setting: str
    reason: str  # one of metrics.catalog.request.LIMIT_REASONS
    wait_seconds: float | None


@dataclass(frozen=True, slots=True)
class Level:
    """A limit as `x-ratelimit-*` headers show it. `reset_seconds` passes until all of it is free."""

    unit: str  # requests or tokens
    limit: int
    remaining: int
    reset_seconds: float


@dataclass(frozen=True, slots=True)
class Reservation:
    """Tokens that a call has booked and not used yet."""

    tier: Tier
    key: str
    tokens: Tokens
    at: float  # time.time()


class RateLimits:
    """Counts by `limits_key` of tenants. Without an answer of the storage it admits, or refuses, as the file says."""

    def __init__(self, file: AccessFile | None, storage_failed: Callable[[], None]):
        uri = "memory" if file is None else file.storage
        self._fails_open = file is None or file.on_storage_failure == "open"
        self._storage_failed = storage_failed
        self._storage = MemoryStorage() if uri == "memory" else _redis(uri)
        self._requests = MovingWindowRateLimiter(self._storage)
        self._tokens = SlidingWindowCounterRateLimiter(self._storage)
        self._blind_until = 0.0

    async def take_request(self, key: str, tier: Tier) -> Limited | None:
        """Counts one request, unless a limit has no room. Raises Rejection 503 as `_ask`."""
        return await self._ask(lambda: self._take_request(key, tier), None)

    async def reserve(self, key: str, tier: Tier, tokens: Tokens) -> Limited | None:
        """Counts the tokens, unless a limit has no room for all of them. Raises Rejection 503 as `_ask`."""
        return await self._ask(lambda: self._reserve(key, tier, tokens), None)

    async def correct(self, reserved: Reservation, used: Tokens) -> None:
        """Books the difference to what was used, more or less.

        Tokens of an earlier minute are not given back: their share of the present one shrinks already.
        """
        await self._ask(lambda: self._correct(reserved, used), None, is_required=False)

    async def levels(self, key: str, tier: Tier) -> list[Level]:
        """Of all limits of a tier."""
        return await self._ask(lambda: self._levels(key, tier), [], is_required=False)

    async def _take_request(self, key: str, tier: Tier) -> Limited | None:
        windows = _windows(tier, REQUEST_WINDOWS)
        for setting, item in windows:
            if not await self._requests.test(item, setting, key):
                stats = await self._requests.get_window_stats(item, setting, key)
                return Limited(setting, "requests", max(0.0, stats.reset_time - time.time()))
        for setting, item in windows:
            if not await self._requests.hit(item, setting, key):  # another front was faster
                return Limited(setting, "requests", 0.0)
        return None

    async def _reserve(self, key: str, tier: Tier, tokens: Tokens) -> Limited | None:
        booked: list[tuple[RateLimitItem, str, int]] = []
        for setting, item in _token_windows(tier):
            cost = tokens.of(setting)
            if not await self._tokens.hit(item, setting, key, cost=cost):
                for other, name, counted in booked:
                    await self._book(other, name, key, -counted)
                return Limited(setting, "tokens", await self._seconds_until(item, setting, key, cost))
            booked.append((item, setting, cost))
        return None

    async def _seconds_until(self, item: RateLimitItem, setting: str, key: str, cost: int) -> float | None:
        """Until the window has room for a cost, if nobody else comes."""
        if cost > item.amount:
            return None
        expiry = item.get_expiry()
        before, before_ttl, now, now_ttl = await self._storage.get_sliding_window(item.key_for(setting, key), expiry)
        room = item.amount - now - cost
        if room >= 0:
            return max(0.0, before_ttl - room * expiry / before) if before > 0 else 0.0
        turn = max(0.0, now_ttl - expiry)  # this minute becomes the one before
        return turn + expiry - (item.amount - cost) * expiry / now

    async def _correct(self, reserved: Reservation, used: Tokens) -> None:
        for setting, item in _token_windows(reserved.tier):
            difference = used.of(setting) - reserved.tokens.of(setting)
            if difference > 0 or (difference < 0 and await self._is_current(item, setting, reserved)):
                await self._book(item, setting, reserved.key, difference)

    async def _is_current(self, item: RateLimitItem, setting: str, reserved: Reservation) -> bool:
        expiry = item.get_expiry()
        window = await self._storage.get_sliding_window(item.key_for(setting, reserved.key), expiry)
        began = time.time() + window[3] - 2 * expiry
        return reserved.at >= began

    async def _book(self, item: RateLimitItem, setting: str, key: str, tokens: int) -> None:
        name = item.key_for(setting, key)
        await self._storage.acquire_sliding_window_entry(name, FORCED, item.get_expiry(), tokens)

    async def _levels(self, key: str, tier: Tier) -> list[Level]:
        levels = []
        for setting, item in _windows(tier, REQUEST_WINDOWS):
            stats = await self._requests.get_window_stats(item, setting, key)
            reset = item.get_expiry() if stats.remaining < item.amount else 0  # the newest call leaves last
            levels.append(Level("requests", item.amount, stats.remaining, reset))
        for setting, item in _token_windows(tier):
            before, before_ttl, now, now_ttl = await self._storage.get_sliding_window(
                item.key_for(setting, key), item.get_expiry()
            )
            counted = before * before_ttl / item.get_expiry() + now
            reset = now_ttl if now > 0 else before_ttl if before > 0 else 0.0
            levels.append(Level("tokens", item.amount, max(0, int(item.amount - counted)), reset))
        return levels

    async def _ask(
        self, ask: Callable[[], Awaitable[Answer]], otherwise: Answer, *, is_required: bool = True
    ) -> Answer:
        """The storage's answer, or `otherwise` without one. Raises Rejection 503 where the file says `closed`."""
        if time.monotonic() >= self._blind_until:
            try:
                async with asyncio.timeout(STORAGE_SECONDS):
                    return await ask()
            except (OSError, TimeoutError, *self._errors()) as error:
                self._blind_until = time.monotonic() + RETRY_STORAGE_SECONDS
                self._storage_failed()
                # Not the error's text: it may hold the address, and that a password.
                log.error("the storage of rate limits does not answer (%s)", type(error).__name__)
        if is_required and not self._fails_open:
            message = "rate limits cannot be counted now, and this server admits nobody without; try again"
            raise Rejection(503, message, code="rate_limit_unavailable", retry_after_seconds=2)
        return otherwise

    def _errors(self) -> tuple[type[Exception], ...]:
        errors = self._storage.base_exceptions
        return errors if isinstance(errors, tuple) else (errors,)


def _windows(tier: Tier, kinds: dict[str, type[RateLimitItem]]) -> list[tuple[str, RateLimitItem]]:
    chosen = ((setting, getattr(tier, setting), kind) for setting, kind in kinds.items())
    return [(setting, kind(amount)) for setting, amount, kind in chosen if amount is not None]


def _token_windows(tier: Tier) -> list[tuple[str, RateLimitItem]]:
    return _windows(tier, dict.fromkeys(TOKEN_WINDOWS, RateLimitItemPerMinute))


def _redis(uri: str):
    return storage_from_string(
        f"async+{uri}", implementation="redispy", key_prefix="sojourn", socket_timeout=STORAGE_SECONDS,
        socket_connect_timeout=STORAGE_SECONDS,
    )  # fmt: skip
