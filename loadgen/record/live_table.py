"""Raw events → rows of the client table during the run, in a process that sends nothing itself."""

import logging
import os
import time
from pathlib import Path

import pyarrow as pa

from loadgen.client.event_log import NO_REQUEST, STARTED, TERMINAL, event_files
from loadgen.record.parse import Event, client_record, due_time, events_by_request
from loadgen.schedule.request import SCHEDULE_FILE, read_schedule
from metrics.records import row
from metrics.run.outage import WriteOutage
from metrics.run.segments import write_segment

log = logging.getLogger(__name__)


class LiveTable:
    """Owns the events of open requests. Reads every segment once, and writes segments of `client`; the table that is
    built after the run replaces them."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._read: set[Path] = set()
        self._open: dict[int, list[Event]] = {}
        self._start_ns: int | None = None
        self._schedule, self._scenario = [], ""
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
        if not self._schedule:
            if not (self._run_dir / SCHEDULE_FILE).exists():
                return
            self._schedule, self._scenario = read_schedule(self._run_dir)
        fresh = [file for file in event_files(self._run_dir) if file not in self._read]
        rows = []
        for index, events in events_by_request(fresh):
            if index == NO_REQUEST:
                self._start_ns = next((ns for _, ns, kind, _ in events if kind == STARTED), self._start_ns)
                continue
            self._open.setdefault(index, []).extend(events)
            if events[-1][2] in TERMINAL:
                request, all_events = self._schedule[index], self._open.pop(index)
                due_ns = due_time(request, self._start_ns, all_events)
                rows.append(row(client_record(request, self._scenario, due_ns, all_events)))
        self._read.update(fresh)
        if rows:
            name = f"{time.time_ns():020d}-{os.getpid()}"
            write_segment(self._run_dir, "client", rows, name)
