"""The files of a run's tables. A table under way is a folder `<table>.parts` of segments, a finished one a single
`<table>.parquet`, of which `compact` makes one.

A segment is a Parquet file, which appears under its name only when it is whole, or a packed one
(metrics/run/packed.py), which grows: whoever reads it takes the frames that are whole.
So a killed process loses what it had not handed over.
"""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from metrics.records import SCHEMAS
from metrics.run.packed import PACKED, tables_of

HOLDS = b"sojourn.segments"  # in the metadata of a compacted table: the names of the segments whose rows are in it
ROWS_AT_ONCE = 65_536  # of a compacted table


def sources(directory: Path, table: str) -> list[Path]:
    """The files that hold a table: the compacted one, and the segments that are not in it yet."""
    whole = directory / f"{table}.parquet"
    segments = _segments(directory, table)
    if not whole.exists():
        return segments
    if segments:
        held = _held(whole)
        segments = [segment for segment in segments if segment.name not in held]
    return [whole, *segments]


def replace_table(final: Path, content: pa.Table) -> Path:
    """Writes one Parquet file, all or nothing."""
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.parent / f".{final.stem}.tmp"
    pq.write_table(content, partial)
    os.replace(partial, final)
    return final


def replace_in_pieces(
    final: Path, schema: pa.Schema, pieces: Iterable[pa.Table], holds: Iterable[Path] = ()
) -> Path:  # fmt: skip
    """The same of a table that never stands in memory as a whole. `holds` are the segments whose rows are in it."""
    partial = final.parent / f".{final.stem}.tmp"
    with pq.ParquetWriter(partial, schema) as writer:
        for piece in pieces:
            writer.write_table(piece)
        if names := [segment.name for segment in holds]:
            writer.add_key_value_metadata({HOLDS: json.dumps(names).encode()})
    os.replace(partial, final)
    return final


def write_segment(directory: Path, table: str, rows: list[dict[str, Any]], name: str, schema: pa.Schema) -> Path:
    """Writes one finished segment of a table, all or nothing."""
    content = pa.Table.from_pylist(rows, schema=schema)
    return replace_table(directory / f"{table}.parts" / f"{name}.parquet", content)


def read_segment(path: Path, table: str) -> pa.Table:
    """The rows of a file of `sources`, with the columns of today's schema."""
    if path.suffix != PACKED:
        return pq.read_table(path, schema=SCHEMAS[table])
    tables = list(tables_of(path, table))
    return pa.concat_tables(tables) if tables else SCHEMAS[table].empty_table()


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
    for batch in _batches(files, table):
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
    return sorted(segment for segment in parts.glob("*") if segment.suffix in (".parquet", PACKED))


def _held(whole: Path) -> set[str]:
    metadata = pq.read_metadata(whole).metadata or {}
    return set(json.loads(metadata.get(HOLDS, b"[]")))


def _batches(files: list[Path], table: str) -> Iterator[pa.RecordBatch]:
    for file in files:
        if file.suffix == PACKED:
            for content in tables_of(file, table):
                yield from content.to_batches()
        else:
            yield from pq.read_table(file, schema=SCHEMAS[table]).to_batches()
