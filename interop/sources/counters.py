"""What counters gained from one scrape to the next, series by series. The live window and the table of a run share it.

A series that falls began anew by itself, and gained what it shows since. One that is missing for a time goes on where
it was. One that appears later began at 0 where its process was on the page before, and is no traffic where the
process itself is new. A page that several processes answer in turn has no sum: `alternates` says so.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from sojourn.interop.sources.source import PROCESS
from sojourn.metrics.catalog.catalog import CATALOG

Series = tuple[str, tuple[tuple[str, str], ...]]  # name, labels
Identity = frozenset[tuple[str, str]]
# Labels of events, not of the process that counts them.
EVENTS = frozenset(label for metric in CATALOG for label in metric.labels if label != "model_name") | {
    "le", "quantile", "finished_reason", "reason", "is_streaming", "mode", "category", "stage", "cache_source",
    "priority", "position", "source", "request_type", "kv_cache_block_type", "general_type", "status_code", PROCESS,
}  # fmt: skip
RETURNS, WITHIN = 2, 4  # falls that are undone within so many scrapes: processes that answer in turn
FALLS, AMONG = 3, 60  # falls between scrapes that follow each other: no engine restarts so often without a gap
GAP = 1.5  # times the usual time between two scrapes: beyond it one is missing


def is_known(value: float) -> bool:
    """NaN and infinity are no reading of a counter or a gauge."""
    return math.isfinite(value)


def gain(before: float, now: float) -> float:
    return now - before if now >= before else now


def tells_restart(name: str) -> bool:
    """Buckets fall with their histogram's count: nothing is learnt from them."""
    return not name.endswith("_bucket")


def identity(labels: Iterable[tuple[str, str]]) -> Identity:
    """The labels of the process and engine behind a series."""
    return frozenset(pair for pair in labels if pair[0] not in EVENTS and pair[1])


def begins_at_zero(of: Identity, known: Iterable[Identity]) -> bool:
    """Whether a series that appears is the first event of a process that was there before."""
    return any(of <= each for each in known)


@dataclass(frozen=True, slots=True)
class Look:
    """One scrape as `alternates` needs it."""

    ns: int
    started: float | None  # when the process began, where the page says so
    fell: Mapping[Series, float] = field(default_factory=dict)  # what fell, and from where
    values: Mapping[Series, float] = field(default_factory=dict)  # at least of the series that fell


def alternates(looks: Sequence[Look]) -> bool:
    """Whether several processes answer in turn: an older process answers again, a newer one has counted more than the
    old one from its first moment, or counters fall and are back a moment later, twice, or fall again and again."""
    latest: float | None = None
    for before, look in zip([Look(0, None), *looks], looks, strict=False):
        if look.started is None:
            continue
        if latest is not None and look.started < latest:
            return True
        if latest is not None and look.started > latest and not look.fell and _goes_on(before, look):
            return True
        latest = look.started
    falls = list(_sudden_falls(looks))
    returns = sum(
        any(later.values.get(series, -1.0) >= value for series, value in looks[place].fell.items()
            for later in looks[place + 1 : place + 1 + WITHIN])
        for place in falls
    )  # fmt: skip
    often = any(last - first < AMONG for first, last in zip(falls, falls[FALLS - 1 :], strict=False))
    return returns >= RETURNS or often


def _sudden_falls(looks: Sequence[Look]) -> Iterator[int]:
    """The looks at which something fell that the look just before had: a process that begins anew takes longer."""
    gaps = sorted(later.ns - look.ns for look, later in pairwise(looks))
    for place, (before, look) in enumerate(pairwise(looks), 1):
        if look.ns - before.ns <= GAP * gaps[len(gaps) // 2] and look.fell.keys() & before.values.keys():
            yield place


def _goes_on(before: Look, look: Look) -> bool:
    counted = {series for series, value in before.values.items() if value > 0}
    return bool(counted) and counted <= look.values.keys()


class Counters:
    """Owns the last value of each series and what it gained since the first scrape."""

    def __init__(self) -> None:
        self._last: dict[Series, float] = {}
        self._known: set[Identity] = set()
        self._listed: set[Series] = set()  # without a value yet: they did not begin later
        self.gained: dict[Series, float] = {}

    def add(
        self, counters: Mapping[Series, float], others: Iterable[Series], unknown: Iterable[Series] = ()
    ) -> dict[Series, float]:
        """A scrape: its counters, its other series, which show who is there, and series without a value.

        Returns what fell, from where."""
        gained, fell = dict(self.gained), {}
        for series, value in counters.items():
            before = self._last.get(series)
            if before is None:
                is_first = series not in self._listed and begins_at_zero(identity(series[1]), self._known)
                gained[series] = value if is_first else 0.0
            else:
                gained[series] += gain(before, value)
                if value < before and tells_restart(series[0]):
                    fell[series] = before
        new = {series for series in counters if series not in self._last}
        self._known |= {identity(labels) for _, labels in [*new, *others]}
        self._listed.update(unknown)
        self._last |= counters
        self.gained = gained
        return fell
