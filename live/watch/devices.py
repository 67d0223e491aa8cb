"""The sensors beside a watched server, joined by time with the requests that its gauges show in it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd

from sojourn.diagnosis.sensor_facts import Flight, SensorFacts, sensor_facts
from sojourn.interop.sources.pressure import RUNNING, WAITING
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import names_of_ours, over_time
from sojourn.live.sensors.feed import SensorFeed
from sojourn.live.watch.window import Window


@dataclass(frozen=True, slots=True)
class Devices:
    """`read`: the table `sensors` between two moments, by the clock of the server's scrapes."""

    read: Callable[[int, int], pd.DataFrame]
    are_all: bool = True  # which of the devices are the server's is not known

    def facts(self, window: Window, begin_ns: int) -> SensorFacts | None:
        """Of the window from a moment on; None without a reading."""
        source, end_ns = window.source, window.last_ns
        if source is None or end_ns is None:
            return None
        rows = self.read(begin_ns, end_ns)
        return sensor_facts(rows, _flight(source, window, begin_ns), are_all=self.are_all) if len(rows) else None


def devices_of(feed: SensorFeed | None, *, is_wall_clock: bool = False) -> Devices | None:
    """Of a server that is watched; `is_wall_clock`: its scrapes are those of a Prometheus."""
    if feed is None:
        return None

    def read(begin_ns: int, end_ns: int) -> pd.DataFrame:
        ahead_ns = time.time_ns() - time.monotonic_ns() if is_wall_clock else 0
        rows = feed.table(begin_ns - ahead_ns, end_ns - ahead_ns)
        return rows.assign(ns=rows.ns + ahead_ns)

    return Devices(read, feed.are_all)


def _flight(source: Source, window: Window, begin_ns: int) -> Flight | None:
    """None of a server that does not say how many requests run."""
    gauges: Sequence[str] = (RUNNING, WAITING)
    shown = over_time(source, "gauge", window.readings(begin_ns, names_of_ours(source, gauges)), "value")
    if RUNNING not in shown:
        return None
    counts = pd.concat([shown[name] for name in gauges if name in shown], axis=1).fillna(0.0).sum(axis=1)
    return Flight(counts.index.to_numpy("int64"), counts.to_numpy("float64"))
