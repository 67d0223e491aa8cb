"""A page of /metrics as rows of the table `scrapes`.

Beside the server's samples stand two of ours, named as Prometheus does: `up`, 0 after a failed scrape, and
`scrape_duration_seconds`.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from sojourn.interop.sources.scrapes import DURATION, UP

Labels = list[tuple[str, str]]
MOST_SERIES = 50_000  # that are remembered, of all servers
_SERIES: dict[str, tuple[str, Labels]] = {}  # as a page writes it → name and labels


class Page(NamedTuple):
    """What a reader wants of a page, and the names of all samples on it."""

    rows: list[dict[str, Any]]
    names: set[str]


def rows_of(page: bytes, ns: int, took_s: float) -> list[dict[str, Any]]:
    """The rows of a page that was read at a moment. Raises ValueError where it is not Prometheus' text."""
    return read_page(page, ns, took_s).rows


def read_page(page: bytes, ns: int, took_s: float, wants: Callable[[str], bool] | None = None) -> Page:
    """As `rows_of`; only samples whose names it `wants` become rows."""
    rows: list[dict[str, Any]] = []
    chosen: dict[str, bool] = {}
    for name, labels, value in _samples(page.decode("utf-8", "replace")):
        if name not in chosen:
            chosen[name] = wants is None or wants(name)
        if chosen[name]:
            rows.append({"ns": ns, "name": name, "labels": labels, "value": value})
    if not chosen:
        raise ValueError("no samples")
    return Page(rows + own_rows(ns, up=1, took_s=took_s), set(chosen))


def _samples(text: str) -> Iterator[tuple[str, Labels, float]]:
    """Every sample. A server writes the same series on each page: the library parses each series once."""
    if len(_SERIES) > MOST_SERIES:
        _SERIES.clear()
    for line in text.splitlines():
        if not line or line[0] == "#":
            continue
        series, _, value = line.rpartition(" ")
        known = _SERIES.get(series)
        if known is not None:
            yield *known, float(value)
            continue
        for family in text_string_to_metric_families(line + "\n"):
            for sample in family.samples:
                labels = list(sample.labels.items())
                if series.endswith("}") or " " not in series:  # else a timestamp, or more, stands behind the value
                    _SERIES[series] = sample.name, labels
                yield sample.name, labels, float(sample.value)


def own_rows(ns: int, up: int, took_s: float) -> list[dict[str, Any]]:
    pairs = ((UP, up), (DURATION, took_s))
    return [{"ns": ns, "name": name, "labels": [], "value": float(value)} for name, value in pairs]
