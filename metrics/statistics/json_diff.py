"""How two JSON documents differ, in words."""

from typing import Any

import msgspec

MOST_CHARACTERS = 60


def differences(before: Any, now: Any, place: str = "", sides: tuple[str, str] = ("there", "here")) -> list[str]:
    """Which values differ, each as `place is X there and Y here`, or whatever the `sides` are called."""
    if isinstance(before, dict) and isinstance(now, dict):
        return [
            found
            for key in dict.fromkeys([*before, *now])
            for found in differences(before.get(key), now.get(key), f"{place}.{key}" if place else str(key), sides)
        ]
    return [] if before == now else [f"{place} is {_short(before)} {sides[0]} and {_short(now)} {sides[1]}"]


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= MOST_CHARACTERS else f"{text[: MOST_CHARACTERS - 3]}..."
