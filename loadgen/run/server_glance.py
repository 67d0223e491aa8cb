"""What the server of a running load shows on /metrics: where its requests' time goes now, its queue, its KV memory."""

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from sojourn.interop.sources.pressure import KV_USE, RUNNING, WAITING
from sojourn.interop.sources.translate import Growth, names_of, over_time
from sojourn.live.watch.window import Window

NOW_S = 10.0


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
        self._window = Window(NOW_S)
        self._lock = threading.Lock()

    def take(self, rows: list[dict[str, Any]]) -> None:
        """The samples of one page: `ns, name, labels, value`."""
        with self._lock, suppress(ValueError):  # a server that is not known, or no answer
            if rows:
                self._window.add(rows[0]["ns"], rows)

    def glance(self) -> ServerGlance | None:
        """None before the first page, of a server that is not known, and where several processes answer in turn."""
        with self._lock:
            source, begin_ns = self._window.source, self._window.begin_of(NOW_S)
            if source is None or begin_ns is None or self._window.alternates:
                return None
            grown = Growth(source, self._window.growth(begin_ns))
            shown = self._window.readings(self._window.last_ns or begin_ns, names_of(source, "gauge"))
        gauges = over_time(source, "gauge", shown, "value")
        running, waiting, kv_use = (
            float(gauges[name].iloc[-1]) if name in gauges and len(gauges[name]) else None
            for name in (RUNNING, WAITING, KV_USE)
        )
        seconds = {span.name: grown.total(span.seconds) or 0.0 for span in source.spans}
        whole = sum(seconds.values())
        shares = sorted(((name, each / whole) for name, each in seconds.items() if each > 0), key=lambda pair: -pair[1])
        return ServerGlance(shares, running, waiting, kv_use)
