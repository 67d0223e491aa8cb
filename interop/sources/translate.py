"""A server's samples in the catalogue's names, as a source translates them: totals, distributions, courses over time.

A value that a server does not export is left out, never 0.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import pandas as pd

from sojourn.interop.sources.source import Labels, Source, Sum, Translation
from sojourn.metrics.catalog.catalog import METRIC_BY_NAME

QUANTILES = (0.5, 0.9, 0.99)
VALUES = ("", "_sum")  # of samples that have a unit, and are no number of observations
SUFFIXES = {"counter": ("",), "histogram": ("_sum", "_count", "_bucket")}  # of what grows
LabelSet = tuple[tuple[str, str], ...]


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """A histogram's growth over the run. A quantile lies somewhere between two bounds of the server."""

    count: float
    mean: float
    between: dict[str, tuple[float, float | None]]  # "p50" → (above, at most); None where no bound is above it


def key(name: str, labels: LabelSet = ()) -> str:
    """`name{label="value"}`, as Prometheus writes it; the name alone without labels."""
    inner = ",".join(f'{label}="{value}"' for label, value in labels)
    return f"{name}{{{inner}}}" if inner else name


def of_family(figures: Mapping[str, float], name: str) -> float | None:
    """All series of a family together, by keys as `key` writes them; None where there is none."""
    parts = [value for written, value in figures.items() if written == name or written.startswith(f"{name}{{")]
    return sum(parts) if parts else None


def names_of(source: Source, kind: str) -> set[str]:
    """The names, without a histogram's suffixes, that a source translates into families of a kind."""
    items = [item for item in source.translations if METRIC_BY_NAME[item.ours].kind == kind]
    return {term.name for item in items for terms in item.theirs for term in terms}


def names_that_grow(source: Source) -> set[str]:
    """The names of all samples that count towards totals, latencies and spans."""
    found = {
        f"{name}{suffix}"
        for kind, suffixes in SUFFIXES.items()
        for name in names_of(source, kind)
        for suffix in suffixes
    }
    for span in source.spans:
        for terms in (span.seconds, span.requests, span.to_first_token, span.first_tokens):
            found |= {term.name for term in terms}
    found |= {term.name for each in source.further.values() for terms in each for term in terms}
    found |= {term.name for pair in source.ratios.values() for terms in pair for term in terms}
    found |= {item.begins_beside for item in source.translations if item.begins_beside}
    return found | {term.name for term in (*source.latency.seconds, *source.latency.requests)}


class Growth:
    """By how much the series of a server grew over a span of time. `rows` as `scrapes.growth` gives them."""

    def __init__(self, source: Source, rows: pd.DataFrame):
        self.resets = int(rows.resets.max()) if len(rows) else 0
        self._source = source
        self._series: dict[str, list[tuple[Labels, float]]] = {}
        by_name: dict[str, list[tuple[Labels, float]]] = {}
        for name, labels, growth in zip(rows.name, rows.labels, rows.growth, strict=True):
            by_name.setdefault(name, []).append((labels, float(growth)))
        for name, series in by_name.items():
            speaks = source.counted([labels for labels, _ in series])
            self._series[name] = [each for each, counts in zip(series, speaks, strict=True) if counts]

    def total(self, terms: Sum, wanted: LabelSet = (), suffix: str = "") -> float | None:
        """The sum of the terms over the series with the wanted labels; None where the server lacks a term."""
        if not terms or not all(f"{term.name}{suffix}" in self._series for term in terms):
            return None
        return sum(
            term.sign * growth * (term.scale if suffix in VALUES else 1.0)
            for term in terms
            for labels, growth in self._series[f"{term.name}{suffix}"]
            if term.holds(labels) and _has(labels, wanted)
        )

    def totals(self) -> dict[str, float]:
        """Catalogue name with labels → growth, of the counters that the server exports."""
        found: dict[str, float] = {}
        for item, terms in self._served("counter"):
            for labels in self._label_sets(item, terms, ""):
                found[key(item.ours, (*item.labels, *labels))] = self.total(terms, labels) or 0.0
        return found

    def further(self) -> dict[str, float]:
        """What no family of the catalogue holds, by the source's names for it."""
        found = {}
        for name, alternatives in self._source.further.items():
            shown = (growth for terms in alternatives if (growth := self.total(terms)) is not None)
            if (growth := next(shown, None)) is not None:
                found[name] = growth
        return found

    def distributions(self) -> dict[str, Distribution]:
        """Catalogue name with labels → distribution, of the histograms that observed something."""
        found: dict[str, Distribution] = {}
        for item, terms in self._served("histogram"):
            for labels in self._label_sets(item, terms, "_count"):
                count, total = (self.total(terms, labels, suffix) for suffix in ("_count", "_sum"))
                if count and total is not None:
                    between = self._quantiles(terms, labels, count)
                    name = key(item.ours, (*item.labels, *labels))
                    found[name] = Distribution(count=count, mean=total / count, between=between)
        return found

    def distribution_of(self, ours: str) -> Distribution | None:
        """A histogram of ours, all series together, without its quantiles; None where nothing was observed."""
        for item, terms in self._served("histogram"):
            if item.ours == ours:
                count, total = self.total(terms, suffix="_count"), self.total(terms, suffix="_sum")
                return (
                    Distribution(count=count, mean=total / count, between={}) if count and total is not None else None
                )
        return None

    def serves(self, ours: str) -> bool:
        """Whether the page has a histogram of ours with its buckets, whatever it observed."""
        return any(
            item.ours == ours and all(f"{term.name}_bucket" in self._series for term in terms)
            for item, terms in self._served("histogram")
        )

    def below(self, ours: str) -> dict[float, float]:
        """Of a histogram of ours, all series together: bound → observations at or below it, math.inf the last one.

        {} where the server lacks it or nothing was observed.
        """
        found: dict[float, float] = {}
        for item, terms in self._served("histogram"):
            if item.ours == ours:
                for bound, count in self._buckets(terms, ()).items():
                    found[bound] = found.get(bound, 0.0) + count
        return dict(sorted(found.items())) if max(found.values(), default=0.0) > 0 else {}

    def _served(self, kind: str) -> Iterator[tuple[Translation, Sum]]:
        """The translations of a kind that the page serves, each with the first alternative whose names are there."""
        suffix = "_count" if kind == "histogram" else ""
        for item in self._source.translations:
            if METRIC_BY_NAME[item.ours].kind == kind:
                there = (terms for terms in item.theirs if all(f"{t.name}{suffix}" in self._series for t in terms))
                terms = next(there, ())
                if terms or item.begins_beside in self._series:
                    yield item, terms

    def _label_sets(self, item: Translation, terms: Sum, suffix: str) -> list[LabelSet]:
        if not item.same_labels:
            return [()]
        series = (self._series.get(f"{term.name}{suffix}", ()) for term in terms)
        return sorted({_same_labels(item, labels) for each in series for labels, _ in each})

    def _buckets(self, terms: Sum, wanted: LabelSet) -> dict[float, float]:
        below: dict[float, float] = {}
        for term in terms:
            for labels, growth in self._series.get(f"{term.name}_bucket", ()):
                if term.holds(labels) and _has(labels, wanted):
                    bound = float(labels["le"]) * term.scale
                    below[bound] = below.get(bound, 0.0) + growth
        return below

    def _quantiles(self, terms: Sum, wanted: LabelSet, count: float) -> dict[str, tuple[float, float | None]]:
        return quantile_bounds(self._buckets(terms, wanted), count)


def quantile_bounds(
    below: Mapping[float, float], count: float, quantiles: Sequence[float] = QUANTILES
) -> dict[str, tuple[float, float | None]]:
    """ "p50" → the two bounds of the buckets between which it lies; None where no finite bound is above it. `below`:
    bound → observations at or below it."""
    bounds, found = sorted(below), {}
    for quantile in quantiles:
        place = next((at for at, bound in enumerate(bounds) if below[bound] >= quantile * count), None)
        if place is not None:
            above = bounds[place - 1] if place else 0.0
            found[f"p{quantile * 100:g}"] = (above, bounds[place] if math.isfinite(bounds[place]) else None)
    return found


def names_of_ours(source: Source, ours: Sequence[str]) -> set[str]:
    """The server's families of which ours are made."""
    return {term.name for item in source.translations if item.ours in ours for terms in item.theirs for term in terms}


def over_time(source: Source, kind: str, rows: pd.DataFrame, column: str) -> dict[str, pd.Series]:
    """Catalogue name with labels → figure by `ns`, of the gauges or counters that the server exports.

    `rows` as `scrapes.readings` or `scrapes.growth_over_time` give them; `column` holds the figure.
    """
    found: dict[str, pd.Series] = {}
    for item in source.translations:
        if METRIC_BY_NAME[item.ours].kind == kind:
            for labels, group in _courses(source, item, rows, column):
                if kind == "gauge" and METRIC_BY_NAME[item.ours].unit == "ratio":
                    group = group[~group.ns.isin(group.ns[~_is_share(group.figure)])]
                by_time = group.groupby("ns").figure
                found[key(item.ours, (*item.labels, *labels))] = by_time.max() if item.largest else by_time.sum()
    return found


def no_shares(source: Source, rows: pd.DataFrame) -> list[str]:
    """A sentence for each gauge of a share that showed something else; `rows` as `scrapes.readings` gives them."""
    shares = {
        term.name
        for item in source.translations
        if METRIC_BY_NAME[item.ours].kind == "gauge" and METRIC_BY_NAME[item.ours].unit == "ratio"
        for terms in item.theirs
        for term in terms
    }
    wrong = rows[rows.name.isin(shares) & ~_is_share(rows.value)].drop_duplicates("name", keep="last")
    return [
        f"{name} showed {value:g}, which is no share from 0 to 1: what it measures is unknown"
        for name, value in zip(wrong.name, wrong.value, strict=True)
    ]


def _is_share(values: pd.Series) -> pd.Series:
    return values.astype("float64").between(0.0, 1.0 + 1e-6)


def _courses(
    source: Source, item: Translation, rows: pd.DataFrame, column: str
) -> Iterator[tuple[LabelSet, pd.DataFrame]]:
    """The rows of a translation by its same labels: `ns, figure`."""
    present = set(rows.name)
    terms = next((terms for terms in item.theirs if all(term.name in present for term in terms)), ())
    parts: dict[LabelSet, list[pd.DataFrame]] = {}
    for term in terms:
        group = rows[rows.name == term.name]
        which = group.labels.map(id)  # the rows of one series share one object
        series = dict(zip(which, group.labels, strict=True))
        for (place, labels), speaks in zip(series.items(), source.counted(list(series.values())), strict=True):
            if speaks and term.holds(labels):
                own = group[which == place]
                part = pd.DataFrame({"ns": own.ns, "figure": term.sign * term.scale * own[column]})
                parts.setdefault(_same_labels(item, labels), []).append(part)
    for labels in sorted(parts):
        yield labels, pd.concat(parts[labels])


def _same_labels(item: Translation, labels: Labels) -> LabelSet:
    return tuple((label, labels.get(label, "")) for label in item.same_labels)


def _has(labels: Labels, wanted: LabelSet) -> bool:
    return all(labels.get(name, "") == value for name, value in wanted)
