"""The document of a search, `sweep.json` or `capacity.json`: what was asked for, every finished run, the result."""

from pathlib import Path
from typing import Any

import msgspec

from metrics.run.directory import RunError
from metrics.search.points import Point


class Search(msgspec.Struct, kw_only=True):
    """`plan` is what makes it this search and no other. `runs_begun` counts those that were cut short, too."""

    kind: str
    plan: dict[str, Any]
    points: list[Point] = msgspec.field(default_factory=list)
    runs_begun: int = 0
    result: dict[str, Any] | None = None


def read_search(file: Path) -> Search:
    """Raises RunError where the file is not what a search writes."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Search)
    except (OSError, msgspec.MsgspecError) as error:
        raise RunError(f"{file} cannot be read: {error}; remove its folder to measure again") from None


def sweeps(runs: Path) -> list[Path]:
    """The sweeps right below a folder, newest first."""
    found = runs.glob("*/sweep.json") if runs.is_dir() else ()
    return [file.parent for file in sorted(found, key=lambda file: (-file.stat().st_mtime_ns, file))]
