"""What the hot path stamped, on disk: one row an event, in segments, complete up to the last second."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from metrics.segments import discard_segments, replace_table

RAW_TABLE = "client_raw"
PROGRESS_FILE = "progress.json"
FLUSH_SECONDS = 0.5

STARTED, DISPATCHED, SENT, BYTES, CLOSED, ERROR, TIMEOUT, CANCELLED = range(8)
TERMINAL = frozenset((CLOSED, ERROR, TIMEOUT, CANCELLED))
NO_REQUEST = -1  # index of the one STARTED event, whose stamp is the start of the schedule

SCHEMA = pa.schema([
    ("seq", pa.int64()),  # order of stamping: two events of a request may share a nanosecond
    ("index", pa.int64()),  # of the scheduled request
    ("ns", pa.int64()),  # monotonic clock
    ("kind", pa.int8()),  # STARTED to CANCELLED
    ("data", pa.binary()),  # the bytes read, or why it ended
])  # fmt: skip

Event = tuple[int, int, int, bytes]  # index, ns, kind, data


def write_events(run_dir: Path, events: list[Event], first_seq: int) -> None:
    """Writes events as one finished segment. Touches no lock and no loop: it runs in a native thread."""
    index, stamps, kinds, data = zip(*events, strict=True)
    columns = [range(first_seq, first_seq + len(events)), index, stamps, kinds, data]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    name = f"{time.time_ns():020d}-{os.getpid()}"
    replace_table(run_dir / f"{RAW_TABLE}.parts" / f"{name}.parquet", pa.Table.from_arrays(arrays, schema=SCHEMA))


@contextmanager
def recording(run_dir: Path) -> Iterator[None]:
    """Says that this process records into a run. The mark is a lock on the folder: it goes with the process."""
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)
        yield
    finally:
        os.close(folder)


@contextmanager
def abandoned(run_dir: Path) -> Iterator[bool]:
    """Whether nobody records into a run; if so, nobody can begin to, before this ends."""
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(folder)


def event_files(run_dir: Path) -> list[Path]:
    """The files that hold events, oldest first."""
    whole = run_dir / f"{RAW_TABLE}.parquet"
    return ([whole] if whole.exists() else []) + sorted((run_dir / f"{RAW_TABLE}.parts").glob("*.parquet"))


def read_events(files: list[Path]) -> pa.Table:
    """The events of these files, by request and in the order of stamping."""
    tables = [pq.read_table(file, schema=SCHEMA) for file in files]
    return pa.concat_tables([SCHEMA.empty_table(), *tables]).sort_by([("index", "ascending"), ("seq", "ascending")])


def compact_events(run_dir: Path) -> None:
    """One file of all segments, once nobody writes. Nothing is removed before the whole stands under its name."""
    parts = run_dir / f"{RAW_TABLE}.parts"
    segments = sorted(parts.glob("*.parquet")) if parts.is_dir() else []
    if segments:
        replace_table(run_dir / f"{RAW_TABLE}.parquet", read_events(event_files(run_dir)))
    discard_segments(run_dir, RAW_TABLE)


def write_progress(run_dir: Path, counts: dict[str, Any]) -> None:
    """How far the run is, for whoever watches: `total, sent, finished, failed`."""
    partial = run_dir / f".{PROGRESS_FILE}.tmp"
    partial.write_text(json.dumps(counts), encoding="utf-8")
    os.replace(partial, run_dir / PROGRESS_FILE)


def read_progress(run_dir: Path) -> dict[str, Any] | None:
    """The last progress written, or None before the first."""
    try:
        return json.loads((run_dir / PROGRESS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
