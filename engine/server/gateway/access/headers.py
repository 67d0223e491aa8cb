"""`x-ratelimit-*` headers, as OpenAI's API sends them."""

from collections.abc import Iterable

from sojourn.engine.server.gateway.access.rate_limits import Level

Headers = list[tuple[bytes, bytes]]


def rate_limit_headers(levels: Iterable[Level]) -> Headers:
    """Of requests and of tokens: for each the limit with the least left, and nothing without a limit."""
    headers: Headers = []
    for unit in ("requests", "tokens"):
        of_unit = [level for level in levels if level.unit == unit]
        if of_unit:
            level = min(of_unit, key=lambda level: level.remaining / level.limit)
            values = (("limit", level.limit), ("remaining", level.remaining), ("reset", duration(level.reset_seconds)))
            headers += [(f"x-ratelimit-{name}-{unit}".encode(), str(value).encode()) for name, value in values]
    return headers


def duration(seconds: float) -> str:
    """In Go's form, which OpenAI uses: 0s, 17ms, 1s, 1.5s, 6m0s, 1h0m0s."""
    milliseconds = round(seconds * 1000)
    if milliseconds <= 0:
        return "0s"
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{milliseconds / 1000:.3f}".rstrip("0").rstrip(".") + "s"
    if hours or minutes:
        text = f"{minutes}m{text}"
    return f"{hours}h{text}" if hours else text
