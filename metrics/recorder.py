"""Records → Parquet segments in a run directory, in the background, bounded, complete up to the last second.

A table under way is a folder `<table>.parts` of finished segments; `compact` makes one `<table>.parquet` of it. A
segment appears under its name only when it is whole, so a killed process leaves nothing half-written.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from metrics.records import SCHEMAS, columns

FLUSH_SECONDS = 0.5
CAPACITY = 65_536  # records that may wait for the writer; more are dropped and counted


def replace_table(final: Path, content: pa.Table) -> Path:
    """Writes one Parquet file, all or nothing."""
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.parent / f".{final.stem}.tmp"
    pq.write_table(content, partial)
    os.replace(partial, final)
    return final


def write_segment(directory: Path, table: str, rows: list[dict[str, Any]], name: str, schema: pa.Schema) -> Path:
    """Writes one finished segment of a table, all or nothing."""
    content = pa.Table.from_pylist(rows, schema=schema)
    return replace_table(directory / f"{table}.parts" / f"{name}.parquet", content)


class Recorder:
    """Owns the ring of records that wait to be written. `append` never blocks and never writes.

    `dropped` counts the records that did not fit, `failed` those of segments that could not be written, for the disk
    is full or gone or a record has no place in its columns; both are exported, so that a gap is never silent.
    """

    def __init__(self, directory: Path, tables: tuple[str, ...], capacity: int = CAPACITY):
        self.directory = Path(directory)
        self.capacity = capacity
        self.dropped = 0
        self.failed = 0
        self.last_error: str | None = None
        self._pending: dict[str, deque] = {table: deque() for table in tables}
        self._closing = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def append(self, table: str, record: Any) -> None:
        pending = self._pending[table]
        if len(pending) >= self.capacity:
            self.dropped += 1
        else:
            pending.append(record)

    def flush(self) -> None:
        """Writes what is pending as one segment a table."""
        with self._writing:
            for table, pending in self._pending.items():
                records = [pending.popleft() for _ in range(len(pending))]
                if not records:
                    continue
                name = f"{time.time_ns():020d}-{os.getpid()}"  # sorts by time, and no two writers share one
                try:
                    replace_table(self.directory / f"{table}.parts" / f"{name}.parquet", columns(table, records))
                except Exception as error:  # the disk, or a value that no column holds: the writer must outlive both
                    self.failed += len(records)
                    self.last_error = f"{table}: {error}"

    def close(self) -> None:
        """Writes the rest and stops the writer. May be called twice."""
        self._closing.set()
        self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self.flush()


def compact(directory: Path, table: str) -> None:
    """Makes one Parquet file of a table's segments. Nothing is removed before the whole stands under its name."""
    parts = directory / f"{table}.parts"
    segments = sorted(parts.glob("*.parquet")) if parts.is_dir() else []
    final = directory / f"{table}.parquet"
    if segments:
        whole = [final, *segments] if final.exists() else segments
        partial = directory / f".{table}.tmp"
        with pq.ParquetWriter(partial, SCHEMAS[table]) as writer:
            for segment in whole:
                writer.write_table(pq.read_table(segment, schema=SCHEMAS[table]))
        os.replace(partial, final)
    discard_segments(directory, table)


def discard_segments(directory: Path, table: str) -> None:
    """Removes the segments of a table whose rows all stand elsewhere."""
    parts = directory / f"{table}.parts"
    if parts.is_dir():
        for leftover in parts.iterdir():
            leftover.unlink()
        parts.rmdir()


# When a row of a server's table happened.
_MOMENT = {"requests": "arrived_ns", "steps": "begin_ns", "system": "ns", "kernels": "begin_ns"}
# The columns that are times of the server's clock; all others that end with _ns are durations.
_STAMPS = {
    "requests": (
        "arrived_ns", "encoded_ns", "queued_ns", "scheduled_ns", "first_written_ns", "written_ns", "finished_ns",
        "token_ns",
    ),
    "steps": ("begin_ns", "end_ns", "planned_ns", "device_end_ns"),
    "system": ("ns",),
    "kernels": ("begin_ns",),
}  # fmt: skip
ToClient = Callable[[np.ndarray], np.ndarray]  # times of a server's clock, int64 → those of the client's


def adopt(
    directory: Path, sources: dict[str, list[Path]], begin_ns: int, end_ns: int, to_client: ToClient | None = None
) -> int:
    """Copies what a server recorded in a span of the client's monotonic clock into another run directory; returns the
    rows. `to_client` where the server's clock was another one.

    `sources` are the Parquet files of each of the tables `requests`, `steps`, `system` and `kernels`.
    """
    rows = 0
    for table, files in sources.items():
        for file in files:
            content = pq.read_table(file, schema=SCHEMAS[table])
            for column in _STAMPS[table] if to_client is not None else ():
                place = content.column_names.index(column)
                content = content.set_column(place, content.field(place), _moved(content[column], to_client))
            moment = content[_MOMENT[table]]
            within = content.filter(pc.and_(pc.greater_equal(moment, begin_ns), pc.less_equal(moment, end_ns)))
            if within.num_rows:
                replace_table(directory / f"{table}.parts" / file.name, within)
                rows += within.num_rows
    return rows


def _moved(column: pa.ChunkedArray, to_client: ToClient) -> pa.Array:
    """The same moments on the client's clock; nulls stay null."""
    whole = column.combine_chunks()
    whole = whole.chunk(0) if isinstance(whole, pa.ChunkedArray) else whole
    if pa.types.is_list(whole.type):
        moved = _moved(pa.chunked_array([whole.flatten()]), to_client)
        lengths = pc.fill_null(pc.list_value_length(whole), 0).to_numpy(zero_copy_only=False)
        offsets = pa.array(np.append(0, np.cumsum(lengths)).astype("int32"))
        return pa.ListArray.from_arrays(offsets, moved, type=whole.type, mask=whole.is_null())
    values = to_client(pc.fill_null(whole, 0).to_numpy(zero_copy_only=False))
    return pa.array(values, whole.type, mask=whole.is_null().to_numpy(zero_copy_only=False))
