"""The last scrapes of one server, in memory: by how much each series grew between two of them, what gauges showed.

A window begins anew where the server does: whoever reads it begins at `begin_of`, which crosses no restart. It answers
what `interop.sources.scrapes` answers of a run's table, in the same frames, a thousand times as often. As there, every
difference is one of `interop.sources.counters`.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd

from sojourn.interop.sources.counters import AMONG, Counters, Look, Series, alternates, is_known
from sojourn.interop.sources.courses import gauges_followed
from sojourn.interop.sources.names import canonical, is_router
from sojourn.interop.sources.registry import TITLES, recognise
from sojourn.interop.sources.scrapes import DURATION, OPEN_FILES, STARTED, UP, ScrapeSummary
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import names_of, names_that_grow

ROUTER = "its /metrics is the page of a router, which counts no engine's tokens; give the address of an engine"
UNKNOWN = f"its /metrics has no family of {TITLES}"


@dataclass(frozen=True, slots=True)
class Scrape:
    """One answered page. `gained` is what each growing series gained since the first scrape, restarts left out."""

    ns: int
    values: dict[Series, float]
    gained: dict[Series, float]
    look: Look
    reset: bool  # something began anew since the scrape before
    took_s: float | None


class Window:
    """Owns the scrapes of the last `keep_s` seconds. Only what the source translates is kept."""

    def __init__(self, keep_s: float):
        self._keep_ns = int(keep_s * 1e9)
        self._scrapes: deque[Scrape] = deque()
        self._counters = Counters()
        self._failed: deque[int] = deque()
        self._alternated_ns = -1  # the last scrape after which several processes were seen to answer in turn
        self._grows: frozenset[str] = frozenset()
        self._wanted: frozenset[str] = frozenset()
        self._labels: dict[Series, dict[str, str]] = {}  # one object a series, as `over_time` needs them
        self.source: Source | None = None
        self._created: frozenset[str] = frozenset()
        self.restarts = 0  # since the first scrape of all
        self.first_ns: int | None = None  # of the server that answers now: a restart begins anew
        self.is_router = False

    def wants(self, name: str) -> bool:
        """Whether samples of this name are read. Of a server that is not known yet all are."""
        return self.source is None or canonical(name) in self._wanted

    def add(self, ns: int, rows: Sequence[dict[str, Any]], on_page: Iterable[str] = ()) -> None:
        """An answered scrape, with rows as `page.rows_of` gives them; `on_page` are names of which it may lack rows.
        Raises ValueError for an unknown server."""
        names = {name: canonical(name) for name in (*(row["name"] for row in rows), *on_page)}
        source, routes = recognise(set(names.values())), is_router(set(names.values()))
        if source is None:
            raise ValueError(ROUTER if routes else UNKNOWN)
        if self.source is None or source.key != self.source.key:
            self._begin(source)
        self.is_router = routes
        values: dict[Series, float] = {}
        unknown, took_s = [], None
        for row in rows:
            name, value = names[row["name"]], float(row["value"])
            if row["name"] == DURATION and took_s is None:
                took_s = row["value"]
            if not is_known(value):
                unknown.append((name, tuple(row["labels"])))
            elif name in self._wanted:
                values[name, tuple(row["labels"])] = value
        self._append(ns, values, unknown, took_s)

    def _append(self, ns: int, values: dict[Series, float], unknown: list[Series], took_s: float | None) -> None:
        growing = {series: value for series, value in values.items() if series[0] in self._grows}
        fell = self._counters.add(growing, values.keys() - growing.keys(), unknown)
        started = [value for series, value in values.items() if series[0] == STARTED]
        look = Look(ns, started[0] if len(started) == 1 else None, fell, growing)
        before = self._scrapes[-1].look.started if self._scrapes else None
        moved = None not in (before, look.started) and before != look.started
        reset = bool(fell) or moved or self._is_created_anew(values)
        self.restarts += reset
        self._scrapes.append(Scrape(ns, values, self._counters.gained, look, reset, took_s))
        self.first_ns = ns if reset or self.first_ns is None else self.first_ns
        while self._scrapes[0].ns < ns - self._keep_ns:
            self._scrapes.popleft()
        recent = islice(self._scrapes, max(0, len(self._scrapes) - AMONG - 1), None)
        if alternates([scrape.look for scrape in recent]):
            self._alternated_ns = ns
        self._forget_failures(ns)

    def _is_created_anew(self, values: dict[Series, float]) -> bool:
        """Whether a counter is younger than it was, which may have counted more than the one before."""
        before = self._scrapes[-1].values if self._scrapes else {}
        return any(value > before.get(series, value) for series, value in values.items() if series[0] in self._created)

    def add_failure(self, ns: int) -> None:
        self._failed.append(ns)
        self._forget_failures(ns)

    def _forget_failures(self, ns: int) -> None:
        while self._failed and self._failed[0] < ns - self._keep_ns:
            self._failed.popleft()

    def _begin(self, source: Source) -> None:
        self.restarts += self.source is not None
        self.source, self.first_ns = source, None
        self._scrapes.clear()
        self._alternated_ns = -1
        self._counters = Counters()
        self._grows = frozenset(names_that_grow(source))
        settings = {each.gauge for each in source.setting_gauges.values()}
        self._created = frozenset(f"{name.removesuffix('_total')}_created" for name in source.engine_counters)
        self._wanted = (
            self._grows
            | names_of(source, "gauge")
            | gauges_followed(source)
            | settings
            | self._created
            | {STARTED, OPEN_FILES, *source.steps}
        )

    @property
    def alternates(self) -> bool:
        """Whether several processes answer in turn, so that no difference of two pages means anything."""
        return bool(self._scrapes) and self._alternated_ns >= self._scrapes[0].ns

    @property
    def answered(self) -> list[Scrape]:
        return list(self._scrapes)

    @property
    def last_ns(self) -> int | None:
        return self._scrapes[-1].ns if self._scrapes else None

    @property
    def interval_s(self) -> float | None:
        """Between two scrapes, on average; None before the second one."""
        gaps = len(self._scrapes) - 1
        return (self._scrapes[-1].ns - self._scrapes[0].ns) / 1e9 / gaps if gaps > 0 else None

    def begin_of(self, seconds: float) -> int | None:
        """The moment of the last scrape that is at least so old; of the first since the server began where none is.
        None without a scrape. Processes that answer in turn begin anew with every page: theirs are all counted."""
        if not self._scrapes:
            return None
        limit = self._scrapes[-1].ns - int(seconds * 1e9)
        old = [scrape.ns for scrape in self._scrapes if scrape.ns <= limit]
        begin_ns = old[-1] if old else self._scrapes[0].ns
        return begin_ns if self.alternates else max(begin_ns, self.first_ns or 0)

    def summary(self, begin_ns: int) -> ScrapeSummary:
        inside = [scrape for scrape in self._scrapes if scrape.ns >= begin_ns]
        took = [scrape.took_s for scrape in inside if scrape.took_s is not None]
        return ScrapeSummary(
            answered_ns=np.array([scrape.ns for scrape in inside], dtype="int64"),
            failed=sum(ns >= begin_ns for ns in self._failed),
            slowest_s=max(took, default=None),
            restarts=sum(scrape.reset for scrape in inside if scrape.ns > begin_ns),
        )

    def growth(self, begin_ns: int, wanted: Iterable[str] | None = None) -> pd.DataFrame:
        """From the scrape of that moment to the last one: `name, labels` (a dict), `growth, resets`."""
        first = next(scrape for scrape in self._scrapes if scrape.ns >= begin_ns)
        names = self._grows if wanted is None else frozenset(wanted)
        resets = sum(scrape.reset for scrape in self._scrapes if scrape.ns > first.ns)
        grown = [
            (series[0], self._label(series), gained - first.gained.get(series, 0.0), resets)
            for series, gained in self._scrapes[-1].gained.items()
            if series[0] in names
        ]
        return pd.DataFrame(grown, columns=["name", "labels", "growth", "resets"])

    def readings(self, begin_ns: int, wanted: Iterable[str]) -> pd.DataFrame:
        """What series showed: `ns, value, name, labels`, in order of time."""
        names = frozenset(wanted)
        rows = [
            (scrape.ns, value, series[0], self._label(series))
            for scrape in self._scrapes
            if scrape.ns >= begin_ns
            for series, value in scrape.values.items()
            if series[0] in names
        ]
        return pd.DataFrame(rows, columns=["ns", "value", "name", "labels"])

    def growth_over_time(self, begin_ns: int, wanted: Iterable[str]) -> pd.DataFrame:
        """Between each two scrapes that follow each other: `ns` (of the later one), `growth, name, labels`."""
        names, rows, before = frozenset(wanted), [], None
        for scrape in (scrape for scrape in self._scrapes if scrape.ns >= begin_ns):
            if before is not None:
                rows += [
                    (scrape.ns, gained - before.gained.get(series, 0.0), series[0], self._label(series))
                    for series, gained in scrape.gained.items()
                    if series[0] in names
                ]
            before = scrape
        return pd.DataFrame(rows, columns=["ns", "growth", "name", "labels"])

    def rows(self, begin_ns: int) -> list[dict[str, Any]]:
        """The scrapes as rows of the table `scrapes`, failed ones included: what `record this` writes.

        Another thread than the one that adds scrapes may call it, so it reads copies."""
        found: list[dict[str, Any]] = []
        for scrape in (scrape for scrape in self.answered if scrape.ns >= begin_ns):
            found += [
                {"ns": scrape.ns, "name": name, "labels": list(labels), "value": value}
                for (name, labels), value in scrape.values.items()
            ]
            found.append({"ns": scrape.ns, "name": UP, "labels": [], "value": 1.0})
        failed = (ns for ns in list(self._failed) if ns >= begin_ns)
        return found + [{"ns": ns, "name": UP, "labels": [], "value": 0.0} for ns in failed]

    def _label(self, series: Series) -> dict[str, str]:
        if series not in self._labels:
            self._labels[series] = dict(series[1])
        return self._labels[series]
