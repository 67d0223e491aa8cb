"""Logs and saved pages as a run directory, so that diagnose, compare, report and the app work on them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sojourn.interop.held.held import Held
from sojourn.interop.held.logs.pages import TOOL as PAGE
from sojourn.interop.held.logs.pages import is_same_server
from sojourn.interop.sources.names import canonical
from sojourn.live.watch.recorded import READ, recorded_meta, write_series
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory

CAPS = ("max_num_seqs", "max_running_requests")
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
GIVE_TWO = "one page has sums since the server's start, so nothing can be said over time; give two, a minute apart"
APART = "the pages have no moments; name how far apart they were taken with --every SECONDS"


def write_evidence(
    found: Sequence[Held], path: Path, objectives: Mapping[str, float], every_s: float | None = None
) -> RunDirectory:
    """One run of a log, or of pages of one server in the order in which they are given. `every_s`: between two pages
    that have no moments. Raises InputError where they are no series of one server."""
    rows = _rows(found, every_s)
    first = found[0]
    capped = _capped(first.settings, rows)
    return write_series(path, rows, recorded_meta("", objectives, is_wall_clock=True) | {
        "invalid_reasons": [READ], "hardware": None,
        "scenario": {"name": Path(first.name).stem, "description": "whatever clients sent"},
        "engine": {"model": str(first.settings.get("model") or first.settings.get("model_path") or
                                first.settings.get("model_name") or ""),
                   "served": {"engine": dict(first.settings)}},
        "versions": {first.server or "server": first.version} if first.version else {},
        "imported": {
            "tool": first.kind, "version": first.version, "file": ", ".join(each.name for each in found),
            "unseen": [] if first.kind == PAGE else first.missing,
            "notes": [*dict.fromkeys(note for held in found for note in held.notes),
                      *(f"line {event.line:,}: {event.sentence}" for held in found for event in held.events)],
            "kept_share": None, "capped": capped,
        },
    })  # fmt: skip


def _rows(found: Sequence[Held], every_s: float | None) -> list[dict[str, Any]]:
    with_series = [each for each in found if each.series]
    if not with_series:
        what = found[0].missing[-1] if found and found[0].missing else "it has no figures over time"
        raise InputError(f"{', '.join(each.name for each in found)}: {what}")
    servers = {each.server for each in with_series}
    if len(servers) > 1 or None in servers:
        raise InputError(f"these files are of {len(servers)} kinds of servers, or of an unknown one; give those of one")
    if with_series[0].kind != PAGE:
        if len(with_series) > 1:
            raise InputError("give one log at a time; two of them are compared with sojourn compare A B")
        return with_series[0].series
    return _pages(with_series, every_s)


def _pages(found: Sequence[Held], every_s: float | None) -> list[dict[str, Any]]:
    if len(found) < 2:
        raise InputError(f"{found[0].name}: {GIVE_TWO}")
    has_moments = all(each.is_wall_clock for each in found) and len({each.series[0]["ns"] for each in found}) == len(
        found
    )
    found = sorted(found, key=lambda held: held.series[0]["ns"]) if has_moments else found
    for before, after in pairwise(found):
        if not is_same_server(before, after):
            raise InputError(
                f"{before.name} and {after.name} are pages of two servers, or of one that was started again between "
                "them, or not the oldest first; compare two with sojourn compare A B"
            )
    if has_moments:
        return [row for each in found for row in each.series]
    if every_s is None:
        raise InputError(APART)
    return [row | {"ns": int(place * every_s * 1e9)} for place, each in enumerate(found) for row in each.series]


def _capped(settings: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """A sentence where as many ran as the server's own setting allows."""
    cap = next((settings[name] for name in CAPS if name in settings), None)
    by_moment: dict[int, float] = {}
    for row in rows:
        if canonical(row["name"]) in RUNNING:
            by_moment[row["ns"]] = by_moment.get(row["ns"], 0.0) + row["value"]
    name = next((name for name in CAPS if name in settings), "")
    if not isinstance(cap, int) or not by_moment or max(by_moment.values()) != cap:
        return ""
    return f"{name} is {cap}, and no more than {cap} ran"
