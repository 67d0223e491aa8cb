"""Rows of scrapes, of a log or of pages, judged as the watch judges a live server."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from sojourn.interop.held.held import Held
from sojourn.interop.sources.scrapes import UP
from sojourn.live.watch.document import WatchedServer
from sojourn.live.watch.observer import Observer

SHORTEST_S = 2.0  # of a window


def judged(held: Sequence[Held], bounds: Mapping[str, float]) -> WatchedServer | None:
    """The verdict of the whole span of the rows; None where they hold fewer than two moments."""
    rows = sorted((row for each in held for row in each.series), key=_moment)
    moments = sorted({row["ns"] for row in rows})
    if len(moments) < 2:
        return None
    window_s = max(SHORTEST_S, (moments[-1] - moments[0]) / 1e9)
    observer = Observer("", ", ".join(dict.fromkeys(each.name for each in held)), bounds, window_s)
    for ns, group in groupby(rows, key=_moment):
        seen = list(group)
        if any(row["name"] != UP for row in seen):
            observer.add(ns, [_with_pairs(row) for row in seen])
        else:
            observer.add_failure(ns, "a scrape failed")
    return observer.watched()


def _moment(row: Mapping[str, Any]) -> int:
    return int(row["ns"])


def _with_pairs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Labels as pairs, as a page gives them."""
    labels = row["labels"]
    return {**row, "labels": list(labels.items()) if isinstance(labels, dict) else [tuple(pair) for pair in labels]}
