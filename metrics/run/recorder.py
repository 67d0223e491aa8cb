"""Records → segments in a run directory, in the background, bounded, complete up to the last second."""

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sojourn.metrics.records.tables import SCHEMAS, columns
from sojourn.metrics.run.outage import WriteOutage
from sojourn.metrics.run.segments import STREAM, StreamSegment

log = logging.getLogger(__name__)
FLUSH_SECONDS = 0.2
ON_DISK_SECONDS = 1.0  # the promise for a record of a server: the front folds steps, then this thread writes
CAPACITY = 65_536  # records of a table that may wait for the writer; more are dropped and counted


class Recorder:
    """Owns the rings of records that wait to be written. `append` never blocks and never writes.

    `dropped` counts the records that did not fit in memory. `failed` counts those that are on no disk: it was full or
    gone, the folder was removed, or a value did not fit its column. Both are exported, and the log has one line when
    failures begin and one when they have ended, so that a gap is never silent.
    """

    def __init__(self, directory: Path, tables: tuple[str, ...], capacity: int = CAPACITY):
        self.directory = Path(directory)
        self.capacity = capacity
        self.dropped = 0
        self.failed = 0
        self.last_error = ""  # of the failures; "" before the first
        self._outage = WriteOutage(log, f"records are written to {self.directory}")
        self._pending: dict[str, deque] = {table: deque() for table in tables}
        self._segments: dict[str, StreamSegment] = {}
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def append(self, table: str, record: Any) -> None:
        """A record that waits for the writer, or is dropped and counted."""
        pending = self._pending[table]
        if len(pending) >= self.capacity:
            self.dropped += 1
        else:
            pending.append(record)

    def extend(self, table: str, records: Iterable[Any]) -> None:
        for record in records:
            self.append(table, record)

    def flush(self) -> None:
        """Writes what is pending, and looks whether what was written is still there."""
        with self._writing:
            failed_before = self.failed
            for table in [table for table, segment in self._segments.items() if segment.is_gone()]:
                removed = FileNotFoundError("their file was removed")
                self._count_failed(table, self._segments[table].num_rows, removed)
                self._end_segment(table)
            for table, pending in self._pending.items():
                if records := [pending.popleft() for _ in range(len(pending))]:
                    self._write(table, records)
            if self.failed == failed_before:
                self._outage.end(f"{self.failed:,} records are lost")

    def close(self) -> None:
        """Writes the rest and stops the writer. May be called twice."""
        self._closing.set()
        self._thread.join()
        self.flush()
        with self._writing:
            for table in list(self._segments):
                self._end_segment(table)

    def _write(self, table: str, records: list[Any]) -> None:
        """All records are written, or counted as failed."""
        try:
            rows = columns(table, records)
        except Exception as error:  # a value that no column holds: the writer must outlive it
            self._count_failed(table, len(records), error)
            return
        try:
            if table not in self._segments:
                name = f"{time.time_ns():020d}-{os.getpid()}{STREAM}"  # sorts by time, and no two writers share one
                path = self.directory / f"{table}.parts" / name
                self._segments[table] = StreamSegment(path, SCHEMAS[table])
            self._segments[table].append(rows)
        except Exception as error:  # the disk
            self._count_failed(table, len(records), error)
            self._end_segment(table)

    def _count_failed(self, table: str, count: int, error: Exception) -> None:
        self.failed += count
        self.last_error = str(error)
        self._outage.begin(
            f"records of the table {table} cannot be written to {self.directory}: {error}; "
            "the server goes on, and counts the records that it loses"
        )

    def _end_segment(self, table: str) -> None:
        segment = self._segments.pop(table, None)
        if segment is not None:
            with suppress(OSError):  # the disk that has failed already, and is counted
                segment.close()

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self.flush()
