"""What a front says of its own time in the headers of an answer: of LiteLLM, how long it worked, and how long all took.

Of a streamed answer the headers are written before its text: then both times end there.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

OVERHEAD, WHOLE = b"x-litellm-overhead-duration-ms", b"x-litellm-response-duration-ms"
NAME = "LiteLLM"


class FrontTimes(NamedTuple):
    """Milliseconds of one answer."""

    overhead_ms: float
    whole_ms: float | None  # overhead and the call to the server behind; None where the front does not say it


def front_times(headers: Mapping[bytes, bytes]) -> FrontTimes | None:
    """None of an answer without such headers, or with one that is no duration."""
    overhead_ms = _duration(headers.get(OVERHEAD))
    return None if overhead_ms is None else FrontTimes(overhead_ms, _duration(headers.get(WHOLE)))


def summary(times: list[FrontTimes]) -> dict[str, Any] | None:
    """The split of a run: `front`, `replies`, and of each part mean, p50 and p99 in ms; None where none says it."""
    if not times:
        return None
    found: dict[str, Any] = {"front": NAME, "replies": len(times)}
    behind = [each.whole_ms - each.overhead_ms for each in times if each.whole_ms is not None]
    for name, values in (("overhead_ms", [each.overhead_ms for each in times]), ("server_ms", behind)):
        if values:
            p50, p99 = np.quantile(values, (0.5, 0.99))
            found[name] = {
                "mean": round(float(np.mean(values)), 3), "p50": round(float(p50), 3), "p99": round(float(p99), 3)
            }  # fmt: skip
    return found


def sentence(found: Mapping[str, Any], streamed: bool) -> str:
    """The split in words."""
    parts = [("its own overhead", found["overhead_ms"])]
    if "server_ms" in found:
        parts.append(("the server behind it", found["server_ms"]))
    shown = ", ".join(f"{what} {each['mean']:,.1f} ms on average (p99 {each['p99']:,.1f})" for what, each in parts)
    until = ", up to the first byte of each stream" if streamed else ""
    return f"{found['front']} says of {found['replies']:,} answers{until}: {shown}"


def _duration(value: bytes | None) -> float | None:
    try:
        found = float(value) if value is not None else -1.0
    except ValueError:
        return None
    return found if 0 <= found < float("inf") else None
