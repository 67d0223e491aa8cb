"""What changed of a server within one series of looks at it: its version, its settings, its process. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, NamedTuple

from sojourn.interop.held.held import Setting
from sojourn.interop.sources.scrapes import STARTED
from sojourn.interop.sources.stated import settings_stated, version_stated

Rows = Sequence[Mapping[str, Any]]


class Stated(NamedTuple):
    """What one look shows of the server, without its load."""

    ns: int
    settings: Mapping[str, Setting]  # and its version
    started: float | None  # when its process began


def changes_within(looks: Sequence[Rows], is_dated: bool) -> list[str]:
    """A sentence for each moment at which the server had another version, setting or process."""
    shown = [_stated(rows) for rows in looks if rows]
    return [sentence for earlier, later in pairwise(each for each in shown if each.settings or each.started is not None)
            for sentence in _between(earlier, later, is_dated)]  # fmt: skip


def _stated(rows: Rows) -> Stated:
    version = version_stated(rows)
    settings = ({"version": version} if version else {}) | settings_stated(rows)
    started = [float(row["value"]) for row in rows if row["name"] == STARTED]
    return Stated(max(row["ns"] for row in rows), settings, min(started, default=None))


def _between(earlier: Stated, later: Stated, is_dated: bool) -> Iterator[str]:
    moved = [f"{name} {earlier.settings[name]} → {value}" for name, value in later.settings.items()
             if name in earlier.settings and earlier.settings[name] != value]  # fmt: skip
    is_new = None not in (earlier.started, later.started) and earlier.started != later.started
    if not moved and not is_new:
        return
    when = f" at {datetime.fromtimestamp(later.ns / 1e9, UTC):%Y-%m-%d %H:%M:%S} UTC" if is_dated else ""
    what = "the server restarted" if is_new else "the server changed"
    yield f"{what}{when}" + (f": {', '.join(moved)}" if moved else ", with the settings that it had")
