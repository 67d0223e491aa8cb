"""The events that the hot path stamps: one row each, in segments, complete up to the last second."""

import fcntl
import json
import os
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sojourn.metrics.run.segments import ROWS_AT_ONCE, discard_segments, replace_in_pieces, replace_table, sources
from sojourn.metrics.whole_file import write_whole

RAW_TABLE = "client_raw"
PROGRESS_FILE = "progress-{}.json"
FLUSH_SECONDS = 0.5
BYTES_AT_ONCE = 2**26  # of events, when they are read: sorting them takes some five times as much
ROW_BYTES = 33  # of an event beside its data

STARTED, DISPATCHED, SENT, BYTES, CLOSED, ERROR, TIMEOUT, CANCELLED, RECONNECTED, DUE, RAN_OUT = range(11)
STOPPED_SENDING = 11  # its data is the reason
REDIRECTED = 12  # what was read is no answer: the request was sent again, to the path that is its data
TERMINAL = frozenset((CLOSED, ERROR, TIMEOUT, CANCELLED))
# Index of STARTED, the start of the schedule; of RAN_OUT: a slot is free, but no request is left; of STOPPED_SENDING:
# what is due later is not sent.
NO_REQUEST = -1
DRAIN_FILE = "stop-sending"  # in the run directory: a load process that finds it sends nothing more

SCHEMA = pa.schema([
    ("seq", pa.int64()),  # order of stamping: two events of a request may share a nanosecond
    ("index", pa.int64()),  # of the scheduled request
    ("ns", pa.int64()),  # monotonic clock
    ("kind", pa.int8()),  # STARTED to REDIRECTED
    ("data", pa.large_binary()),  # the bytes read, or why it ended; a run has more than 32-bit offsets reach
])  # fmt: skip


class EventLog:
    """Events as flat columns: an append creates no object for the garbage collector to walk."""

    __slots__ = ("data", "index", "kind", "ns")

    def __init__(self) -> None:
        self.index, self.ns, self.kind = array("q"), array("q"), array("b")
        self.data: list[bytes] = []

    def __len__(self) -> int:
        return len(self.data)

    def add(self, index: int, ns: int, kind: int, data: bytes = b"") -> None:
        self.index.append(index)
        self.ns.append(ns)
        self.kind.append(kind)
        self.data.append(data)


def write_events(run_dir: Path, events: EventLog, first_seq: int, shift_ns: int = 0) -> None:
    """Writes events as one segment, in a native thread. `shift_ns`, added to every stamp, converts the clock of another
    host to that of the master."""
    name = f"{time.time_ns():020d}-{os.getpid()}"
    replace_table(run_dir / f"{RAW_TABLE}.parts" / f"{name}.parquet", _table(events, first_seq, shift_ns))


def warm_up() -> None:
    """Performs one flush before the run: the first one loads libraries."""
    pq.write_table(_table(EventLog(), 0, 0), pa.BufferOutputStream())


def _table(events: EventLog, first_seq: int, shift_ns: int) -> pa.Table:
    size = len(events)
    stamps = np.frombuffer(events.ns, np.int64) + shift_ns
    ends = np.cumsum(np.fromiter(map(len, events.data), np.int64, size))
    offsets = np.concatenate([np.zeros(1, np.int64), ends])
    # From buffers: pa.array would import pandas first, which stops the process for a tenth of a second.
    arrays = [
        _numbers(np.arange(first_seq, first_seq + size, dtype=np.int64)),
        _numbers(np.frombuffer(events.index, np.int64)),
        _numbers(stamps),
        _numbers(np.frombuffer(events.kind, np.int8)),
        pa.Array.from_buffers(
            pa.large_binary(), size, [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(events.data))]
        ),
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _numbers(values: np.ndarray) -> pa.Array:
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


@contextmanager
def recording(run_dir: Path) -> Iterator[None]:
    """Marks this process as recording into a run. The mark is a lock on the folder, so it ends with the process."""
    folder = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_SH)
        yield
    finally:
        os.close(folder)


@contextmanager
def abandoned(run_dir: Path) -> Iterator[bool]:
    """Whether no process records into a run. If so, none can start to before this context ends."""
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
    return sources(run_dir, RAW_TABLE)


def ordered_events(files: list[Path], most_bytes: int = BYTES_AT_ONCE) -> Iterator[pa.Table]:
    """The events of these files, by request and in the order of stamping. Each table holds whole requests of about
    `most_bytes`, so that memory does not grow with the run."""
    sizes, reach = _survey(files)
    begins = np.flatnonzero(np.diff((np.cumsum(sizes) - sizes) // most_bytes, prepend=-1)) + NO_REQUEST
    for begin, end in pairwise([*begins.tolist(), len(sizes) + NO_REQUEST]):
        within = [("index", ">=", begin), ("index", "<", end)]
        tables = [
            pq.read_table(file, schema=SCHEMA, filters=within)
            for file, (lowest, highest) in reach.items()
            if lowest < end and highest >= begin
        ]
        yield pa.concat_tables([SCHEMA.empty_table(), *tables]).sort_by([("index", "ascending"), ("seq", "ascending")])


def _survey(files: list[Path]) -> tuple[np.ndarray, dict[Path, tuple[int, int]]]:
    """[index − NO_REQUEST] bytes of each request's events, and the lowest and highest index in each file."""
    sizes, reach = np.zeros(0, np.int64), {}
    for file in files:
        with pq.ParquetFile(file) as opened:
            for batch in opened.iter_batches(ROWS_AT_ONCE, columns=["index", "data"]):
                index = batch.column("index").to_numpy()
                if not len(index):
                    continue
                lowest, highest = int(index.min()), int(index.max())
                before = reach.get(file, (lowest, highest))
                reach[file] = min(lowest, before[0]), max(highest, before[1])
                if (missing := highest - NO_REQUEST + 1 - len(sizes)) > 0:
                    sizes = np.pad(sizes, (0, max(missing, len(sizes))))
                lengths = pc.binary_length(batch.column("data")).to_numpy(zero_copy_only=False)
                np.add.at(sizes, index - NO_REQUEST, lengths + ROW_BYTES)
    return np.trim_zeros(sizes, "b"), reach


def first_stamp(files: list[Path]) -> int:
    """The earliest stamp of all events; 0 where there are none."""
    found = (pc.min(pq.read_table(file, columns=["ns"])["ns"]).as_py() for file in files)
    return min((ns for ns in found if ns is not None), default=0)


def compact_events(run_dir: Path) -> None:
    """Joins all segments into one file after the run. They are removed only once that file is in place."""
    files, final = event_files(run_dir), run_dir / f"{RAW_TABLE}.parquet"
    if files and files != [final]:
        replace_in_pieces(final, SCHEMA, ordered_events(files), holds=files)
    discard_segments(run_dir, RAW_TABLE)


def write_progress(run_dir: Path, counts: dict[str, int], shard: int = 0) -> None:
    """Writes the progress of one process: `total, sent, finished, failed`."""
    write_whole(run_dir / PROGRESS_FILE.format(shard), json.dumps(counts))


def read_progress(run_dir: Path) -> dict[str, int] | None:
    """The last progress of all processes together, or None before the first."""
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(run_dir.glob(PROGRESS_FILE.format("*")))]
    return {name: sum(counts[name] for counts in parts) for name in parts[0]} if parts else None


def request_drain(run_dir: Path, reason: str) -> None:
    """Has all load processes of a run send nothing more, within FLUSH_SECONDS; requests in flight end."""
    write_whole(run_dir / DRAIN_FILE, reason)


def drain_reason(run_dir: Path) -> str:
    """Why a run was asked to send nothing more; "" where it was not."""
    try:
        return (run_dir / DRAIN_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def discard_progress(run_dir: Path) -> None:
    (run_dir / DRAIN_FILE).unlink(missing_ok=True)
    for file in run_dir.glob(PROGRESS_FILE.format("*")):
        file.unlink(missing_ok=True)
