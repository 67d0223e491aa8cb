"""The files of a run's tables. A growing table is a folder `<table>.parts` of segments; a finished one is a single
`<table>.parquet`, which `compact` makes of them.

A segment is a Parquet file, which appears under its name only when it is whole, or an Arrow IPC stream, to which a
recorder appends record batches. A reader of a stream takes its whole batches. So a killed process loses only the rows
that it had not appended.
"""

import io
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.records.tables import SCHEMAS

STREAM = ".arrows"
HOLDS = b"sojourn.segments"  # in the metadata of a compacted table: the names of the segments whose rows are in it
ROWS_AT_ONCE = 65_536  # of a compacted table
# Table → today's name of a column → its name in older runs.
FORMER_NAMES = {"steps": {"shadow_evicted_blocks": "forgotten_blocks", "nucleus_mass_ppm": "kept_mass_ppm"}}


class StreamSegment:
    """An Arrow IPC stream that grows. After a failed append no reader could read on: begin another segment then."""

    def __init__(self, path: Path, schema: pa.Schema):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("xb", buffering=0)
        self._unwritten = io.BytesIO()  # Arrow writes each buffer of a batch on its own; the file gets them at once
        options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
        self._stream = pa.ipc.new_stream(self._unwritten, schema, options=options)
        self.num_rows = 0

    def append(self, rows: pa.Table) -> None:
        """Raises OSError."""
        self._stream.write_table(rows)
        content = self._unwritten.getvalue()
        if self._file.write(content) != len(content):
            raise OSError("the disk took only a part of it")
        self._unwritten.seek(0)
        self._unwritten.truncate()
        self.num_rows += rows.num_rows

    def is_gone(self) -> bool:
        """Whether its file was removed, moved or replaced: what is written from now on would reach no reader."""
        try:
            return not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return True
        except (OSError, ValueError):  # it cannot be looked at now: the next append fails, and is counted
            return False

    def close(self) -> None:
        """Leaves no file without rows: on a full disk there would be one more each second."""
        self._file.close()
        if not self.num_rows:
            self._path.unlink(missing_ok=True)


class GrowingStream:
    """A file that a `StreamSegment` of another process may still write."""

    def __init__(self, path: Path):
        self._path = path
        self._schema: pa.Schema | None = None
        self._at = 0  # bytes of the messages that were taken

    def take(self) -> Iterator[pa.RecordBatch]:
        """The whole batches that came since the last call, up to the end or to a batch that was cut off."""
        size = self._path.stat().st_size
        with pa.OSFile(str(self._path)) as opened:
            opened.seek(self._at)
            messages = pa.MessageReader.open_stream(opened)
            while True:
                try:
                    message = messages.read_next_message()
                except StopIteration:  # or zeros: the power went before the disk had the batch
                    return
                except (pa.ArrowInvalid, OSError):
                    if opened.tell() >= size:
                        return
                    raise
                if self._schema is None:
                    self._schema = pa.ipc.read_schema(message)
                    self._at = opened.tell()
                    continue
                batch = pa.ipc.read_record_batch(message, self._schema)
                self._at = opened.tell()
                yield batch


def sources(directory: Path, table: str) -> list[Path]:
    """The files that hold a table: the compacted one, and the segments that are not in it yet."""
    whole = directory / f"{table}.parquet"
    segments = _segments(directory, table)
    if not whole.exists():
        return segments
    if segments:
        compacted = _compacted_segments(whole)
        segments = [segment for segment in segments if segment.name not in compacted]
    return [whole, *segments]


def replace_table(final: Path, content: pa.Table) -> Path:
    """Writes one Parquet file, all or nothing."""
    final.parent.mkdir(parents=True, exist_ok=True)
    return replace_in_pieces(final, content.schema, [content])


def replace_in_pieces(final: Path, schema: pa.Schema, pieces: Iterable[pa.Table], holds: Iterable[Path] = ()) -> Path:
    """The same of a table that never stands in memory as a whole. `holds` are the segments whose rows are in it."""
    partial = final.parent / f".{final.stem}.tmp"
    try:
        with pq.ParquetWriter(partial, schema) as writer:
            for piece in pieces:
                writer.write_table(piece)
            if names := [segment.name for segment in holds]:
                writer.add_key_value_metadata({HOLDS: json.dumps(names).encode()})
        os.replace(partial, final)
    except BaseException:
        partial.unlink(missing_ok=True)  # a full disk needs the room
        raise
    return final


def write_segment(directory: Path, table: str, rows: list[dict[str, Any]], name: str) -> Path:
    """Writes one finished segment of a table, all or nothing."""
    content = pa.Table.from_pylist(rows, schema=SCHEMAS[table])
    return replace_table(directory / f"{table}.parts" / f"{name}.parquet", content)


def read_segment(path: Path, table: str, columns: Sequence[str] = ()) -> pa.Table:
    """The rows of a file of `sources`, with the columns of today's schema, or with these of them."""
    return pa.Table.from_batches(_batches(path, table, columns), schema_of(table, columns))


def conformed(rows: pa.Table, table: str) -> pa.Table:
    """Rows that were read in another way, with the columns of today's schema."""
    schema = SCHEMAS[table]
    return pa.Table.from_batches([_as_today(batch, table, schema) for batch in rows.to_batches()], schema)


def schema_of(table: str, columns: Sequence[str] = ()) -> pa.Schema:
    return pa.schema([SCHEMAS[table].field(name) for name in columns]) if columns else SCHEMAS[table]


def compact(directory: Path, table: str) -> None:
    """Makes one Parquet file of a table's segments. Nothing is removed before the whole stands under its name; a reader
    who comes in between, or after we were killed there, finds no row twice."""
    files = sources(directory, table)
    final = directory / f"{table}.parquet"
    if files and files != [final]:
        replace_in_pieces(final, SCHEMAS[table], _pieces(files, table), holds=_segments(directory, table))
    discard_segments(directory, table)


def _pieces(files: list[Path], table: str) -> Iterator[pa.Table]:
    """All rows, ROWS_AT_ONCE or more in each but the last: a long run has a batch for each of its seconds."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in chain.from_iterable(_batches(file, table) for file in files):
        waiting.append(batch)
        rows += len(batch)
        if rows >= ROWS_AT_ONCE:
            yield pa.Table.from_batches(waiting)
            waiting, rows = [], 0
    if waiting:
        yield pa.Table.from_batches(waiting)


def discard_segments(directory: Path, table: str) -> None:
    """Removes the segments of a table whose rows all stand elsewhere."""
    parts = directory / f"{table}.parts"
    if parts.is_dir():
        for leftover in parts.iterdir():
            leftover.unlink()
        parts.rmdir()


def _segments(directory: Path, table: str) -> list[Path]:
    parts = directory / f"{table}.parts"
    if unreadable := next(parts.glob("*.packed"), None):
        raise RunDataError(f"{unreadable} is of an older version of Sojourn, and only that version reads it")
    return sorted(segment for segment in parts.glob("*") if segment.suffix in (".parquet", STREAM))


def _compacted_segments(whole: Path) -> set[str]:
    metadata = pq.read_metadata(whole).metadata or {}
    return set(json.loads(metadata.get(HOLDS, b"[]")))


def _batches(file: Path, table: str, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    schema = schema_of(table, columns)
    former = FORMER_NAMES.get(table, {})
    wanted = [*schema.names, *(former[name] for name in schema.names if name in former)] if columns else None
    whole = GrowingStream(file).take() if file.suffix == STREAM else _whole_table(file, wanted).to_batches()
    for batch in whole:
        yield _as_today(batch, table, schema)


def _as_today(batch: pa.RecordBatch, table: str, schema: pa.Schema) -> pa.RecordBatch:
    """Columns that this version does not know are left out; columns that the writer did not know are null."""
    known, former = set(batch.schema.names), FORMER_NAMES.get(table, {})
    arrays = []
    for field in schema:
        name = field.name if field.name in known else former.get(field.name)
        arrays.append(batch[name].cast(field.type) if name in known else pa.nulls(len(batch), field.type))
    return pa.record_batch(arrays, schema)


def _whole_table(file: Path, columns: list[str] | None = None) -> pa.Table:
    """Raises ArrowInvalid for a damaged count of rows, for which Arrow would take memory without a bound."""
    with pq.ParquetFile(file) as opened:
        metadata = opened.metadata
        for group in map(metadata.row_group, range(metadata.num_row_groups)):
            if any(group.num_rows > group.column(index).num_values for index in range(group.num_columns)):
                raise pa.ArrowInvalid(f"a group of {file.name} has more rows than values")
        known = [name for name in columns if name in opened.schema_arrow.names] if columns is not None else None
        return opened.read(known)
