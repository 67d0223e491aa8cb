"""NAME=PATH settings: one pair, several with commas, or a list of pairs, as a command line has them."""

import re
from pathlib import Path
from typing import Any

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")


def named_pairs(value: Any, what: str) -> Any:
    """Name → path of pairs that are texts; a map stays what it is. Raises ValueError."""
    if value is None:
        return {}
    if isinstance(value, str):
        value = [pair.strip() for pair in value.split(",") if pair.strip()]
    if not isinstance(value, list | tuple):
        return value
    named: dict[str, str] = {}
    for pair in value:
        name, equals, folder = str(pair).partition("=")
        if not equals or not folder:
            raise ValueError(f"{pair!r} is not NAME=FOLDER")
        if name in named:
            raise ValueError(f"two {what} have the name {name!r}")
        named[name] = folder
    return named


def checked_names(value: dict[str, Path], what: str) -> dict[str, Path]:
    """With `~` replaced. Raises ValueError for a name that requests could not send."""
    for name in value:
        if not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no name for {what}; use letters, digits and . _ : / - (at most 128)")
    return {name: folder.expanduser() for name, folder in value.items()}
