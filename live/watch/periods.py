"""A recorded series judged period by period, as a watch would have: a log of a day is bad for a part of it."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from statistics import median
from typing import Any

from sojourn.interop.sources.scrapes import UP
from sojourn.live.watch.document import State, WatchedServer
from sojourn.live.watch.observer import WINDOW_S, Observer

MOST_PERIODS, MOST_SCRAPES = 30, 900
DAY_NS = 86_400 * 10**9
LEAST_SCRAPES = 6  # of a period: of fewer gauges say little
SEVERITY: tuple[State, ...] = ("stuck", "overloaded", "degraded", "unreachable", "cannot tell", "healthy", "idle")
BAD = ("stuck", "overloaded", "degraded")


@dataclass(frozen=True, slots=True)
class Periods:
    """The worst period, and when it was bad."""

    worst: WatchedServer
    count: int
    bad: int
    seconds: float  # of one
    first_bad_ns: int | None  # the end of the scrape before the first bad period
    last_bad_ns: int | None

    def when(self) -> str:
        """`3 of 20 periods of 60 s, first from 16:19:04, last until 16:21:24`; "" where none or all were bad."""
        if self.first_bad_ns is None or self.last_bad_ns is None:
            return ""
        is_long = self.count * self.seconds * 1e9 > DAY_NS
        begin, end = stamp(self.first_bad_ns, is_long), stamp(self.last_bad_ns, is_long)
        return f"{self.bad} of {self.count} periods of {self.seconds:.0f} s were so, from {begin} to {end}"


def stamp(ns: int, with_day: bool = False) -> str:
    """The moment as the evidence writes it, in UTC."""
    return time.strftime("%m-%d %H:%M:%S" if with_day else "%H:%M:%S", time.gmtime(ns / 1e9))


def periods(rows: Iterable[Mapping[str, Any]], name: str, bounds: Mapping[str, float]) -> Periods | None:
    """Rows of the table `scrapes`; None where they hold fewer than two moments."""
    looks = thinned([(int(ns), list(look)) for ns, look in groupby(sorted(rows, key=_moment), key=_moment)])
    if len(looks) < 2:
        return None
    span_s = (looks[-1][0] - looks[0][0]) / 1e9
    usual_s = median((later - before) / 1e9 for (before, _), (later, _) in pairwise(looks))
    length_s = min(max(WINDOW_S, LEAST_SCRAPES * usual_s, span_s / MOST_PERIODS), max(span_s, 1e-3))
    judged = list(_judge(looks, Observer("", name, bounds, length_s, is_now=False), length_s))
    worst = min(judged, key=lambda each: (SEVERITY.index(each[2].state), -_line(each[2])))
    bad = [each for each in judged if each[2].state in BAD]
    return Periods(
        worst=worst[2], count=len(judged), bad=len(bad), seconds=length_s,
        first_bad_ns=bad[0][0] if bad else None, last_bad_ns=bad[-1][1] if bad else None,
    )  # fmt: skip


def thinned(looks: Sequence[tuple[int, list]]) -> Sequence[tuple[int, list]]:
    """At most so many looks, evenly: counters lose nothing by it, and gauges stay samples."""
    every = -(-len(looks) // MOST_SCRAPES)
    return [look for place, look in enumerate(looks) if place % every == 0 or place == len(looks) - 1]


def _judge(
    looks: Sequence[tuple[int, list]], observer: Observer, length_s: float
) -> Iterator[tuple[int, int, WatchedServer]]:
    """Begin, end and verdict of each period. The last one is as long as the others, and may overlap."""
    begin_ns = looks[0][0]
    for place, (ns, look) in enumerate(looks):
        if all(row["name"] == UP for row in look):
            observer.add_failure(ns, "a scrape failed")
        else:
            observer.add(ns, [_with_pairs(row) for row in look])
        is_full = ns - begin_ns >= (1 - 1e-6) * length_s * 1e9
        if is_full or (place == len(looks) - 1 and ns > begin_ns):
            yield begin_ns, ns, observer.watched()
            begin_ns = ns


def _line(server: WatchedServer) -> float:
    waiting = server.view.gauges.get("sojourn_request_waiting") if server.view is not None else None
    return waiting.mean if waiting is not None else 0.0


def _moment(row: Mapping[str, Any]) -> int:
    return int(row["ns"])


def _with_pairs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Labels as pairs, as a page gives them."""
    labels = row["labels"]
    return {**row, "labels": list(labels.items()) if isinstance(labels, Mapping) else [tuple(pair) for pair in labels]}
