"""Own arrays behind a Prometheus page: numbers and histograms by label values, written as text when someone scrapes.

A Series knows no record and no meaning: it holds what a list of metrics declares. Durations are kept as integer
nanoseconds, so that sums are exact, and become seconds in the text (format 0.0.4 of Prometheus).
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import add

import numpy as np

from sojourn.metrics.catalog.metric import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FEW = 64  # values: below it numpy's calls cost more than a loop

Labels = tuple[str, ...]


class Histogram:
    """Counts between inclusive upper bounds, and the exact sum; the last count is of what lies above all bounds."""

    __slots__ = ("_array", "bounds", "counts", "total")

    def __init__(self, bounds: list[float]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0
        self._array = np.asarray(bounds)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def observe_all(self, values: Sequence[int] | np.ndarray) -> None:
        """An array, where there are many, saves making one of them."""
        if len(values) < FEW and not isinstance(values, np.ndarray):
            bounds, counts = self.bounds, self.counts
            for value in values:
                counts[bisect_left(bounds, value)] += 1
            self.total += sum(values)
        else:
            array = np.asarray(values)
            places = np.searchsorted(self._array, array, side="left")
            self.counts = list(map(add, self.counts, np.bincount(places, minlength=len(self.counts)).tolist()))
            self.total += array.sum().item()


class Series:
    """The samples of some metrics. `constant` are the labels that all of them carry.

    `numbers` (counters and gauges) and `histograms` go from a metric's name to its samples by label values. A counter's
    series that the catalogue declares exist from the start; a gauge has none before it is set.
    """

    def __init__(self, metrics: Iterable[Metric], constant: Mapping[str, str]):
        self.metrics = {metric.name: metric for metric in metrics}
        self.numbers: dict[str, dict[Labels, float]] = {}
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        self._constant = "".join(f'{name}="{_escaped(value)}",' for name, value in constant.items())
        self._heads = {name: _head(metric) for name, metric in self.metrics.items()}
        self._openings: dict[tuple[str, Labels], list[str]] = {}  # what stands before the values, made once
        for name, metric in self.metrics.items():
            if metric.kind == "histogram":
                per_unit = metric.stored_per_unit
                bounds = [round(bound * per_unit) if per_unit > 1 else bound for bound in metric.buckets]
                declared = {labels: Histogram(bounds) for labels in metric.values}
                self.histograms[name] = defaultdict(partial(Histogram, bounds), declared)
            else:
                known = metric.values if metric.kind == "counter" else ()
                self.numbers[name] = defaultdict(int, dict.fromkeys(known, 0))

    def page(self) -> str:
        """All families as text; those without a sample yet are declared all the same."""
        lines: list[str] = []
        for name, metric in self.metrics.items():
            lines.append(self._heads[name])
            per_unit = metric.stored_per_unit
            if metric.kind == "histogram":
                for labels, histogram in self.histograms[name].items():
                    *buckets, total, count = self._opening(metric, labels)
                    counts = list(accumulate(histogram.counts))
                    lines += [f"{opening}{number}.0" for opening, number in zip(buckets, counts, strict=True)]
                    lines.append(f"{total}{histogram.total / per_unit}")
                    lines.append(f"{count}{counts[-1]}.0")
            else:
                for labels, number in self.numbers[name].items():
                    lines.append(f"{self._opening(metric, labels)[0]}{number / per_unit}")
        return "\n".join(lines) + "\n"

    def _opening(self, metric: Metric, labels: Labels) -> list[str]:
        key = (metric.name, labels)
        if key not in self._openings:
            own = "".join(f'{name}="{_escaped(value)}",' for name, value in zip(metric.labels, labels, strict=True))
            inner = self._constant + own
            if metric.kind == "histogram":
                bounds = [*(str(float(bound)) for bound in metric.buckets), "+Inf"]
                self._openings[key] = [
                    *(f'{metric.name}_bucket{{{inner}le="{bound}"}} ' for bound in bounds),
                    f"{metric.name}_sum{{{inner[:-1]}}} ",
                    f"{metric.name}_count{{{inner[:-1]}}} ",
                ]
            else:
                self._openings[key] = [f"{metric.name}{{{inner[:-1]}}} "]
        return self._openings[key]


def merged(pages: Sequence[bytes]) -> bytes:
    """The pages of several models as one: the samples of a family stand together, as the format wants it."""
    if len(pages) == 1:
        return pages[0]
    families: dict[str, list[str]] = {}
    for page in pages:
        for family in page.decode().split("# HELP ")[1:]:
            head, kind, *samples = family.rstrip("\n").split("\n")
            families.setdefault(f"# HELP {head}\n{kind}", []).extend(samples)
    return "".join("\n".join([head, *samples]) + "\n" for head, samples in families.items()).encode()


class Tallies:
    """Counters with one label, each the sum of a field that is a map of label value → number. Most maps are empty."""

    def __init__(self, series: Series, fields: Mapping[str, str]):
        self._counters = [(series.numbers[name], field) for name, field in fields.items()]

    def add_all(self, values: Callable[[str], Iterable[Mapping[str, int]]]) -> None:
        """`values` of a field: its map in each record."""
        for samples, field in self._counters:
            for numbers in values(field):
                for label, number in numbers.items():
                    samples[(label,)] += number


def _head(metric: Metric) -> str:
    help_text = metric.help.replace("\\", "\\\\").replace("\n", "\\n")
    return f"# HELP {metric.name} {help_text}\n# TYPE {metric.name} {metric.kind}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
