"""What the server of a running load shows on /metrics: where its requests' time goes now, its queue, its KV memory."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from metrics.sources.pressure import KV_USE, RUNNING, WAITING
from metrics.sources.registry import recognise
from metrics.sources.translate import Growth, over_time

NOW_NS = 10_000_000_000


@dataclass(frozen=True, slots=True)
class ServerGlance:
    """`accounts`: the largest accounts or spans, each with its share of the time of the last 10 s. Gauges are None
    where the server lacks them."""

    accounts: list[tuple[str, float]]
    running: float | None
    waiting: float | None
    kv_use: float | None


class ServerWatch:
    """Owns the pages of the last 10 s. `take` is called by the thread that scrapes, `glance` by the one that shows."""

    def __init__(self) -> None:
        self._pages: deque[tuple[int, list[Mapping[str, Any]]]] = deque()

    def take(self, rows: list[dict[str, Any]]) -> None:
        """The samples of one page: `ns, name, labels, value`."""
        if rows:
            self._pages.append((rows[0]["ns"], rows))
            while len(self._pages) > 2 and self._pages[1][0] < rows[0]["ns"] - NOW_NS:
                self._pages.popleft()

    def glance(self) -> ServerGlance | None:
        """None before the first page, and of a server that is not known."""
        pages = list(self._pages)
        source = recognise({row["name"] for row in pages[-1][1]}) if pages else None
        if source is None:
            return None
        page = pd.DataFrame(pages[-1][1]).assign(labels=lambda rows: rows.labels.map(dict))
        gauges = over_time(source, "gauge", page, "value")
        running, waiting, kv_use = (
            float(gauges[name].iloc[-1]) if name in gauges and len(gauges[name]) else None
            for name in (RUNNING, WAITING, KV_USE)
        )
        grown = Growth(source, _growth(pages[0][1], pages[-1][1]))
        seconds = {span.name: grown.total(span.seconds) or 0.0 for span in source.spans}
        whole = sum(seconds.values())
        shares = sorted(((name, each / whole) for name, each in seconds.items() if each > 0), key=lambda pair: -pair[1])
        return ServerGlance(shares, running, waiting, kv_use)


def _growth(before: list[Mapping[str, Any]], after: list[Mapping[str, Any]]) -> pd.DataFrame:
    """`name, labels, growth, resets` between two pages; a counter that fell began anew."""
    first = {(row["name"], tuple(row["labels"])): row["value"] for row in before}
    rows = []
    for row in after:
        old = first.get((row["name"], tuple(row["labels"])), 0.0)
        reset = row["value"] < old
        growth = row["value"] - (0.0 if reset else old)
        rows.append({"name": row["name"], "labels": dict(row["labels"]), "growth": growth, "resets": int(reset)})
    return pd.DataFrame(rows)
