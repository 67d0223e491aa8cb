"""What a load has come to so far: goodput and latencies by class, and the share that a sequential test resolves.

It reads finished rows of the client table, in the process that watches the load, never in the one that sends it.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from sojourn.loadgen.schedule.request import ScheduledRequest
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.request.goodput import judged
from sojourn.metrics.request.objectives import objectives_of
from sojourn.metrics.run.directory import with_latencies
from sojourn.metrics.statistics.confidence_sequence import SequentialShare

RECENT_NS = 10_000_000_000
LATE_NS = 2_000_000_000  # events are on disk after this long: what was due before is known


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One class so far. Latencies in ms from the intended send; None before the first."""

    klass: str
    ended: int
    good: int
    failed: int
    goodput_rps: float  # good requests a second that ended in the last 10 s
    ttft_ms: tuple[float, float] | None  # p50, p90
    tpot_ms: tuple[float, float] | None


@dataclass(slots=True)
class _Class:
    ended: int = 0
    good: int = 0
    failed: int = 0
    recent: deque[int] = field(default_factory=deque)  # when good requests ended, ns
    ttft_ms: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)


class LiveFigures:
    """Owns the figures of one run. Requests of the warm-up do not count."""

    def __init__(self, objectives: list[dict[str, Any]], warmup_s: float):
        self.share = SequentialShare()
        self._objectives, self._warmup_ns = objectives, int(warmup_s * 1e9)
        self._classes: dict[str, _Class] = {}
        self._e2e_ms: deque[float] = deque(maxlen=200)
        self._waiting: list[tuple[int, int, bool, float]] = []  # due, index, good, latency: until all before are known
        self._known_late: set[int] = set()
        self._first_due_ns: int | None = None

    def add(self, ended: list[tuple[ScheduledRequest, dict[str, Any]]]) -> None:
        """Requests that ended, with their rows of `client`."""
        ended = [(request, row) for request, row in ended if not request.prelude]
        if not ended:
            return
        if self._first_due_ns is None:
            self._first_due_ns = min(row["due_ns"] for _, row in ended)
        begin_ns = self._first_due_ns + self._warmup_ns
        ended = [(request, row) for request, row in ended if row["due_ns"] >= begin_ns]
        if not ended:
            return
        frame = pd.DataFrame([row for _, row in ended], columns=SCHEMAS["client"].names)
        rows = judged(with_latencies(frame), self._objectives)
        for (request, _), row in zip(ended, rows.to_dict("records"), strict=True):
            self._count(row)
            if request.index not in self._known_late:
                latency = row["e2e_ms"] if row["status"] == "ok" else np.inf
                heapq.heappush(self._waiting, (int(row["due_ns"]), request.index, bool(row["good"]), float(latency)))

    def _count(self, row: dict[str, Any]) -> None:
        found = self._classes.setdefault(row["klass"], _Class())
        found.ended += 1
        found.failed += row["status"] != "ok"
        if row["good"]:
            found.good += 1
            found.recent.append(int(row["last_byte_ns"]))
        if row["status"] == "ok":
            self._e2e_ms.append(row["e2e_ms"])
        for name in ("ttft_ms", "tpot_ms"):
            if not np.isnan(row[name]):
                getattr(found, name).append(row[name])

    def settle(self, open_requests: list[tuple[ScheduledRequest, int, bool]], now_ns: int) -> None:
        """Gives the sequential test all requests up to the first whose outcome is not known. `open_requests`: each
        with its due time and whether bytes came. One without any, beyond its TTFT objective, has missed it."""
        frontier_ns = now_ns - LATE_NS
        for request, due_ns, answered in open_requests:
            if request.prelude or request.index in self._known_late:
                continue
            bound_ms = objectives_of(request.klass, self._objectives).get("ttft_ms")
            if bound_ms is not None and not answered and due_ns + bound_ms * 1e6 < now_ns - LATE_NS:
                self._known_late.add(request.index)
                heapq.heappush(self._waiting, (due_ns, request.index, False, np.inf))
            else:
                frontier_ns = min(frontier_ns, due_ns)
        good, latencies = [], []
        while self._waiting and self._waiting[0][0] < frontier_ns:
            _, _, was_good, latency = heapq.heappop(self._waiting)
            good.append(was_good)
            latencies.append(latency)
        self.share.add(good, latencies)

    def classes(self, now_ns: int) -> list[ClassFigures]:
        return [self._figures(klass, self._classes[klass], now_ns) for klass in sorted(self._classes)]

    def typical_s(self) -> float:
        """Median end-to-end latency of the last requests; 0 before the first."""
        return float(np.median(self._e2e_ms)) / 1e3 if self._e2e_ms else 0.0

    def _figures(self, klass: str, found: _Class, now_ns: int) -> ClassFigures:
        while found.recent and found.recent[0] < now_ns - RECENT_NS:
            found.recent.popleft()
        begin_ns = max(now_ns - RECENT_NS, (self._first_due_ns or now_ns) + self._warmup_ns)
        seconds = max(1.0, (now_ns - begin_ns) / 1e9)
        ttft_ms, tpot_ms = (
            tuple(np.quantile(values, (0.5, 0.9)).tolist()) if values else None
            for values in (found.ttft_ms, found.tpot_ms)
        )
        return ClassFigures(klass, found.ended, found.good, found.failed, len(found.recent) / seconds, ttft_ms, tpot_ms)
