"""The state of a load that runs, for those who watch it; and the decision to stop it once its question is answered."""

import time
from dataclasses import dataclass
from typing import Any

import msgspec

from sojourn.loadgen.client.event_log import request_drain
from sojourn.loadgen.record.live_figures import ClassFigures
from sojourn.loadgen.record.live_table import LiveTable
from sojourn.loadgen.run.server_glance import ServerGlance, ServerWatch
from sojourn.loadgen.scenario.scenario import Scenario
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.statistics.resolution import STEADY_PROCESSES, Resolution, resolution


@dataclass(frozen=True, slots=True)
class LiveView:
    """`test`: how far the sequential test is, "" without one. `seconds_left` is an estimate, None before the start."""

    classes: list[ClassFigures]
    seconds_left: float | None
    server: ServerGlance | None
    test: str


def check_stop_when_resolved(scenario: Scenario, target: float | None) -> None:
    """Raises InputError where a sequential test would say nothing about the scenario."""
    if target is None:
        return
    if not scenario.objectives and not any(klass.objectives for klass in scenario.workload.classes):
        raise InputError(f"--stop-when-resolved needs an objective, and scenario {scenario.name} has none")
    process = scenario.arrivals.process
    if process not in STEADY_PROCESSES:
        raise InputError(
            f"--stop-when-resolved: arrivals of process {process!r} are not steady, so a part of the run says nothing "
            f"about the rest; it works with {', '.join(STEADY_PROCESSES)}"
        )


class LiveRun:
    """Owns what is known of one run while it is sent, and stops it once `stop_at` is resolved."""

    def __init__(self, run: RunDirectory, stop_at: float | None, watch: ServerWatch):
        meta: dict[str, Any] = run.meta()
        self._run, self._stop_at, self._watch = run, stop_at, watch
        self._table = LiveTable(run.path, meta["objectives"])
        self._duration_s = (meta["scenario"]["arrivals"] or {}).get("duration_s")
        self._is_closed = (meta.get("arrivals") or {}).get("loop") == "closed"
        self.resolution: Resolution | None = None
        self.view: LiveView | None = None
        self._told_s: float | None = None  # the smallest time left that was told: it never rises

    def update(self, counts: dict[str, int] | None) -> None:
        """Reads what ended since the last call, and asks the load to stop where the answer is resolved."""
        self._table.update()
        figures, now_ns = self._table.figures, time.monotonic_ns()
        if figures is None:
            return
        if self._stop_at is not None and self.resolution is None:
            self.resolution = resolution(figures.share, self._stop_at)
            if self.resolution is not None:
                self._run.update_meta(resolution=msgspec.to_builtins(self.resolution))
                request_drain(self._run.path, self.resolution.sentence())
        left_s = self._never_rising(self._seconds_left(counts, now_ns))
        self.view = LiveView(figures.classes(now_ns), left_s, self._glance(), self._test())

    def end(self) -> None:
        """All was sent and has ended: a question that is still open is noted in the run."""
        self.update(None)
        if self._stop_at is not None and self.resolution is None and (sentence := self._test()):
            self._run.update_meta(unresolved=f"{sentence}, after all requests")

    def _glance(self) -> ServerGlance | None:
        try:
            return self._watch.glance()
        except (KeyError, ValueError):  # a page that is not as its version's: it costs the view, not the run
            return None

    def _test(self) -> str:
        if self._stop_at is None or self._table.figures is None:
            return ""
        if self.resolution is not None:
            return self.resolution.sentence()
        low, high = self._table.figures.share.interval
        return f"target {self._stop_at:.0%}: not resolved yet, between {low:.0%} and {high:.0%}"

    def _never_rising(self, left_s: float | None) -> float | None:
        """The estimate, or the smaller one that was told before: a reader takes a rise for a fault."""
        if left_s is None:
            return None
        self._told_s = left_s if self._told_s is None else min(left_s, self._told_s)
        return self._told_s

    def _seconds_left(self, counts: dict[str, int] | None, now_ns: int) -> float | None:
        """Of an open load until its last request is due and answered; of a closed loop to the end of its duration, or
        at the rate so far."""
        reader, figures = self._table.reader, self._table.figures
        if reader.start_ns is None or counts is None or figures is None:
            return None
        ended = counts["finished"] + counts["failed"]
        if ended >= counts["total"] > 0:
            return 0.0
        elapsed_s, typical_s = (now_ns - reader.start_ns) / 1e9, figures.typical_s()
        if self.resolution is not None:
            return typical_s
        last_due_ns = None if self._is_closed else reader.last_due_ns()
        if last_due_ns is not None:
            return max(0.0, (last_due_ns - now_ns) / 1e9) + typical_s
        if self._is_closed and self._duration_s:
            return max(0.0, self._duration_s - elapsed_s) + typical_s
        return (counts["total"] - ended) * elapsed_s / ended if ended else None
