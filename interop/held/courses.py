"""Figures of a log, of many pages or of a Prometheus in windows of time: how sure a mean is, and when it changed. Pure.

Windows that follow each other depend on each other: `metrics.compare.dependence` says what a mean of them is worth. A
change is found by the self-normalised statistic of Shao and Zhang (2010), which chooses no bandwidth. Where windows
depend on each other for long it finds too many: so a change also has to be sudden, beside what neighbouring parts of
the series differ by elsewhere, and the series worth enough independent windows. One change is looked for in each.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pandas as pd

from sojourn.interop.held.held import Held
from sojourn.interop.held.logs.pages import GAUGES, MEANS, PREFIX, TOOL, split
from sojourn.interop.sources.counters import Counters, Series, is_known
from sojourn.interop.sources.names import canonical
from sojourn.interop.sources.pressure import GENERATED
from sojourn.interop.sources.registry import recognise
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import Growth, key, names_that_grow, of_family, over_time
from sojourn.metrics.compare.dependence import error_of_mean, first_order_time
from sojourn.metrics.statistics.dependent_samples import CAUTION, initial_sequence_time, t_quantile

MOST_WINDOWS, FEWEST_WINDOWS = 120, 16
TWO_SIDED = 0.975  # one tail of an interval of 95%
CRITICAL = 68.6  # of the statistic, at 1%, since several series are looked at (Shao and Zhang, 2010, table 1, one mean)
FEWEST_TO_CHANGE = 60  # windows
FEWEST_INDEPENDENT = 16.0  # windows, around the two means
SUDDEN = 2.5  # times what neighbouring parts usually differ by
SMALLEST_SIDE = 4  # windows on either side of a change
CLEAR = 1.2  # a ratio of two means, or its inverse
LEAST_MOVE = {"share": 0.05, "requests": 1.0}  # that a figure of this unit moves
Rows = Sequence[Mapping[str, Any]]


class Course(NamedTuple):
    """One figure in windows of time. Windows in which it has no value are left out."""

    name: str
    unit: str
    ns: np.ndarray  # [windows, 2] begin and end of each; 0 where nobody wrote the moment
    values: np.ndarray  # [windows]
    weights: np.ndarray  # [windows] of a mean: how much each has of what it is a mean of

    @property
    def mean(self) -> float:
        return float(np.average(self.values, weights=self.weights))

    def relative_error(self) -> tuple[float, float] | None:
        """Standard error of the logarithm of the mean and its degrees of freedom; None of too few windows, or of 0."""
        if len(self.values) < FEWEST_WINDOWS or not self.mean > 0:
            return None
        found = error_of_mean(self.weights * (self.values / self.mean - 1) / self.weights.mean(), [], self.name)
        return found.error, max(found.degrees, 1.0)


class Changed(msgspec.Struct, frozen=True, kw_only=True):
    """One figure that has another mean from a moment on."""

    name: str
    unit: str
    before: float
    after: float
    begin_ns: int  # the change lies between these two moments
    end_ns: int
    statistic: float

    @property
    def is_clear(self) -> bool:
        if abs(self.after - self.before) < LEAST_MOVE.get(self.unit, 0.0):
            return False
        low, high = sorted((self.before, self.after))
        return high > 0 and (low <= 0 or high / low >= CLEAR)


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """When the figures of one series changed, and what else did meanwhile: restarts, versions, settings."""

    schema: str = "sojourn.changes/1"
    changes: list[Changed]
    within: list[str]  # sentences


def looks_in(held: Sequence[Held]) -> list[Rows]:
    """What each moment showed, of one log, of several pages, or of a period of a Prometheus."""
    if len(held) > 1:
        return [each.series for each in held if each.kind == TOOL]
    rows = sorted(held[0].series, key=lambda row: row["ns"]) if held else []
    return [list(group) for _, group in groupby(rows, key=lambda row: row["ns"])]


def courses_of(looks: Sequence[Rows]) -> list[Course]:
    """Empty of too few looks, or of an unknown server."""
    source = recognise({canonical(row["name"]) for rows in looks for row in rows})
    if source is None or len(looks) < FEWEST_WINDOWS + 1:
        return []
    every = math.ceil((len(looks) - 1) / MOST_WINDOWS)
    windows = [(place, min(place + every, len(looks) - 1)) for place in range(0, len(looks) - 1, every)]
    shown: dict[str, list[tuple[int, int, float, float]]] = {}
    units: dict[str, str] = {}
    grown = _growth(source, looks)
    for first, last in windows:
        begin, end = (max(row["ns"] for row in looks[place]) for place in (first, last))
        gained = {series: value - grown[first].get(series, 0.0) for series, value in grown[last].items()}
        rows = [row for place in range(first + 1, last + 1) for row in looks[place]]
        for name, unit, value, weight in _figures(source, gained, rows, (end - begin) / 1e9):
            units[name] = unit
            if weight > 0 and math.isfinite(value):
                shown.setdefault(name, []).append((begin, end, value, weight))
    return [
        Course(name, units[name], np.array([each[:2] for each in found], dtype="int64"),
               np.array([each[2] for each in found]), np.array([each[3] for each in found]))
        for name, found in shown.items()
    ]  # fmt: skip


def _growth(source: Source, looks: Sequence[Rows]) -> list[dict[Series, float]]:
    """What counters gained from the first look to each."""
    grows, counters, found = names_that_grow(source), Counters(), []
    for rows in looks:
        counters.add(*split(rows, grows))
        found.append(counters.gained)
    return found


def _figures(
    source: Source, gained: Mapping[Series, float], rows: Rows, seconds: float
) -> Iterator[tuple[str, str, float, float]]:
    """Name, unit, value and weight of each figure of one window."""
    frame = pd.DataFrame(
        [(name, dict(labels), growth, 0) for (name, labels), growth in gained.items()],
        columns=["name", "labels", "growth", "resets"],
    )
    grown = Growth(source, frame)
    for name, (family, factor, unit) in MEANS.items():
        if (found := grown.distribution_of(family)) is not None:
            yield name, unit, factor * found.mean, found.count
    totals = grown.totals()
    if (tokens := of_family(totals, GENERATED)) is not None and seconds > 0:
        yield "output_tokens_per_s", "tokens/s", tokens / seconds, seconds
    hit, miss = (totals.get(key(PREFIX, (("result", result),))) or 0.0 for result in ("hit", "miss"))
    if hit + miss > 0:
        yield "hit_rate", "share", hit / (hit + miss), hit + miss
    gauges = pd.DataFrame(
        [(row["ns"], float(row["value"]), canonical(row["name"]), dict(row["labels"])) for row in rows
         if is_known(float(row["value"]))],
        columns=["ns", "value", "name", "labels"],
    )  # fmt: skip
    levels = over_time(source, "gauge", gauges, "value")
    for name, (family, unit) in GAUGES.items():
        if family in levels and len(levels[family]):
            yield name, unit, float(levels[family].mean()), 1.0


def ratio_bounds(before: Course | None, after: Course | None) -> tuple[float, float] | None:
    """The interval of 95% of the ratio of two means; None where a side has too few windows."""
    errors = [each.relative_error() if each is not None else None for each in (before, after)]
    if before is None or after is None or errors[0] is None or errors[1] is None:
        return None
    error = math.hypot(errors[0][0], errors[1][0])
    parts = sum(each[0] ** 4 / each[1] for each in errors if each is not None)
    half = error * t_quantile(TWO_SIDED, error**4 / parts if parts > 0 else math.inf)
    effect = math.log(after.mean / before.mean)
    return math.exp(max(effect - half, -700.0)), math.exp(min(effect + half, 700.0))


def bounds_of(before: Sequence[Course], after: Sequence[Course]) -> dict[str, tuple[float, float]]:
    """By the name of each figure that both have in enough windows."""
    theirs = {each.name: each for each in after}
    found = {each.name: ratio_bounds(each, theirs.get(each.name)) for each in before}
    return {name: bounds for name, bounds in found.items() if bounds is not None}


def change_points(courses: Sequence[Course]) -> list[Changed]:
    """Of each series that surely changed, and clearly, by how sure it is."""
    found = [change for each in courses if (change := change_point(each)) is not None and change.is_clear]
    return sorted(found, key=lambda each: -each.statistic)


def change_point(course: Course) -> Changed | None:
    values, count = course.values, len(course.values)
    values = np.log(values) if count and values.min() > 0 else values
    if count < FEWEST_TO_CHANGE or not float(np.ptp(values)) > 0:
        return None
    statistic, place = max((_self_normalised(values, place), place)
                           for place in range(SMALLEST_SIDE, count - SMALLEST_SIDE + 1))  # fmt: skip
    parts = values[:place], values[place:]
    around = np.concatenate([part - part.mean() for part in parts])
    independent = count / max(CAUTION * initial_sequence_time(around), first_order_time(around))
    if statistic <= CRITICAL or independent < FEWEST_INDEPENDENT or not _is_sudden(values, place):
        return None
    before, after = (float(np.average(course.values[part], weights=course.weights[part]))
                     for part in (slice(place), slice(place, None)))  # fmt: skip
    return Changed(name=course.name, unit=course.unit, before=before, after=after, statistic=statistic,
                   begin_ns=int(course.ns[place - 1][0]), end_ns=int(course.ns[place][1]))  # fmt: skip


def _is_sudden(values: np.ndarray, place: int) -> bool:
    """Whether neighbouring parts differ at the change as they do nowhere else: a slow wave has no such place."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(SMALLEST_SIDE, len(values) - SMALLEST_SIDE + 1)
    local = (sums[ends + SMALLEST_SIDE] - 2 * sums[ends] + sums[ends - SMALLEST_SIDE]) / SMALLEST_SIDE
    elsewhere = local[np.abs(ends - place) >= SMALLEST_SIDE]
    usual = math.sqrt(float(np.square(elsewhere).mean())) if len(elsewhere) else math.inf
    return abs(float(local[place - SMALLEST_SIDE])) > SUDDEN * usual


def _self_normalised(values: np.ndarray, place: int) -> float:
    """(Σ of the first `place` of what is off the mean)² over the wander of both parts around their own means."""
    off = float((values[:place] - values.mean()).sum()) ** 2
    wander = sum(float(np.square(np.cumsum(part - part.mean())).sum()) for part in (values[:place], values[place:]))
    if not wander > 0:
        return math.inf if off > 0 else 0.0
    return off * len(values) / wander


def dated(looks: Sequence[Rows]) -> bool:
    """Whether the moments of the looks are known."""
    moments = [max(row["ns"] for row in rows) for rows in looks if rows]
    return all(later > earlier > 0 for earlier, later in pairwise(moments))
