"""Raw events → rows of the client table during the run, in a process that sends nothing itself."""

import logging
import os
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from sojourn.loadgen.client.event_log import BYTES, NO_REQUEST, RAW_TABLE, STARTED, TERMINAL, event_files
from sojourn.loadgen.record.live_figures import LiveFigures
from sojourn.loadgen.record.parse import Event, client_record, due_time, events_by_request
from sojourn.loadgen.schedule.request import ScheduledRequest, read_requests, read_warmup_s, schedule_files
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.outage import WriteOutage
from sojourn.metrics.run.segments import write_segment

log = logging.getLogger(__name__)


class LiveReader:
    """Owns the events of open requests. Reads every segment once; after the run one file holds the events of all
    segments, also of those that were read."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._read: set[Path] = set()
        self._open: dict[int, list[Event]] = {}
        self._ended: set[int] = set()
        self.schedule: dict[int, ScheduledRequest] = {}  # by index
        self.start_ns: int | None = None
        self._scenario = ""

    def ended(self) -> list[tuple[ScheduledRequest, dict[str, Any]]]:
        """The requests that ended since the last call, with their rows of `client`. Raises OSError, ArrowException."""
        fresh = [file for file in event_files(self._run_dir) if file not in self._read]
        planned = [file for file in schedule_files(self._run_dir) if file not in self._read]  # before their events
        for file in planned:
            requests, self._scenario = read_requests(file)
            self.schedule |= {request.index: request for request in requests}
        if not self.schedule:
            return []
        found = []
        if self._run_dir / f"{RAW_TABLE}.parquet" in fresh:
            self._open.clear()
        for index, events in events_by_request(fresh):
            if index == NO_REQUEST:
                self.start_ns = next((ns for _, ns, kind, _ in events if kind == STARTED), self.start_ns)
                continue
            if index in self._ended:
                continue
            self._open.setdefault(index, []).extend(events)
            if events[-1][2] in TERMINAL:
                request, all_events = self.schedule[index], self._open.pop(index)
                self._ended.add(index)
                due_ns = due_time(request, self.start_ns, all_events)
                found.append((request, row(client_record(request, self._scenario, due_ns, all_events)[0])))
        self._read.update(fresh, planned)
        return found

    def open_requests(self) -> list[tuple[ScheduledRequest, int, bool]]:
        """Those in flight, each with its due time and whether bytes came."""
        found = []
        for index, events in self._open.items():
            request = self.schedule[index]
            if (due_ns := due_time(request, self.start_ns, events)) is not None:
                found.append((request, due_ns, any(kind == BYTES for _, _, kind, _ in events)))
        return found

    def last_due_ns(self) -> int | None:
        """When the last request of an open load is due; None before the start, and of a closed loop."""
        offsets = [each.due_offset_ns for each in self.schedule.values() if each.due_offset_ns is not None]
        return None if self.start_ns is None or not offsets else self.start_ns + max(offsets)


class LiveTable:
    """Writes segments of `client` as requests end; the table that is built after the run replaces them."""

    def __init__(self, run_dir: Path, objectives: list[dict[str, Any]]):
        self._run_dir = run_dir
        self.reader = LiveReader(run_dir)
        self._objectives = objectives
        self.figures: LiveFigures | None = None
        self._outage = WriteOutage(log, f"the run is recorded in {run_dir}")

    def update(self) -> None:
        """Writes the requests that ended since the last call. A write error costs the live view, never the run; the
        load generator, whose own log stands in the same folder, cannot report it elsewhere."""
        try:
            if not self._run_dir.is_dir():
                raise FileNotFoundError("its folder was removed")
            self._update()
            self._outage.end()
        except (OSError, pa.ArrowException) as error:
            self._outage.begin(f"the run cannot be recorded in {self._run_dir}: {error}; the load goes on")

    def _update(self) -> None:
        ended = self.reader.ended()
        if not self.reader.schedule:
            return
        if self.figures is None:
            self.figures = LiveFigures(self._objectives, read_warmup_s(self._run_dir))
        self.figures.add(ended)
        self.figures.settle(self.reader.open_requests(), time.monotonic_ns())
        if ended:
            name = f"{time.time_ns():020d}-{os.getpid()}"
            write_segment(self._run_dir, "client", [each for _, each in ended], name)
