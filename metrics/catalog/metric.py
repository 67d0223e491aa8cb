"""The declaration of a metric, for the files `<lifecycle>.py` beside this one."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
NS_PER_SECOND = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of time series. A histogram's buckets are upper bounds, inclusive, in `unit`."""

    name: str
    kind: Kind
    unit: str
    lifecycle: str
    meaning: str
    cannot: str
    labels: tuple[str, ...] = ()
    # Label values known beforehand: their series exist from the start, so that a rate never misses the first event.
    values: tuple[tuple[str, ...], ...] = ()
    buckets: tuple[float, ...] = ()
    scale: int = 1  # units of a record in one `unit`, where that is not seconds

    @property
    def stored_per_unit(self) -> int:
        """The exporter stores the records' integers: nanoseconds for seconds."""
        return NS_PER_SECOND if self.unit == "seconds" else self.scale

    @property
    def help(self) -> str:
        return f"{self.meaning} {self.cannot}"


def log_buckets(first: float, last: float, per_decade: int) -> tuple[float, ...]:
    """Bounds from `first` to at least `last`, evenly spaced on a logarithmic axis, rounded to two digits."""
    bounds: list[float] = []
    index = 0
    while not bounds or bounds[-1] < last:
        bounds.append(float(f"{first * 10 ** (index / per_decade):.1e}"))
        index += 1
    return tuple(bounds)


TOKEN_BOUNDS = (1.0, *(float(base << power) for power in range(17) for base in (2, 3)))  # 1 2 3 4 6 8 12 … 196608
LATENCY_BOUNDS = log_buckets(0.001, 600, per_decade=6)
GAP_BOUNDS = log_buckets(0.000_1, 30, per_decade=6)
STEP_BOUNDS = log_buckets(0.000_05, 10, per_decade=6)
WORK_BOUNDS = log_buckets(0.000_01, 10, per_decade=5)  # work on the host, from one short prompt to a huge one
LAG_BOUNDS = log_buckets(0.000_01, 50, per_decade=5)
PROCESSES = ("front", "core")
RATIO_BOUNDS = log_buckets(0.1, 10, per_decade=14)


def _metric(
    kind: Kind, lifecycle: str, name: str, unit: str, meaning: str, cannot: str, /, **labels: Iterable[str]
) -> Metric:
    """One label with its values; an empty list of values says that they are only known once they occur."""
    names = tuple(labels)
    values: tuple[tuple[str, ...], ...] = () if names else ((),)
    if len(names) == 1:
        values = tuple((value,) for value in labels[names[0]])
    return Metric(f"sojourn_{lifecycle}_{name}", kind, unit, lifecycle, meaning, cannot, names, values)


counter, gauge = partial(_metric, "counter"), partial(_metric, "gauge")


def histogram(
    lifecycle: str,
    name: str,
    unit: str,
    buckets: tuple[float, ...],
    meaning: str,
    cannot: str,
    scale: int = 1,
    **labels: Iterable[str],
) -> Metric:
    return replace(_metric("histogram", lifecycle, name, unit, meaning, cannot, **labels), buckets=buckets, scale=scale)
