"""The last seconds of a table that a server still records: what a watch judges again and again.

A reading takes in only what was written since the one before. Rows that no window can need any more are forgotten.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.records.tables import SCHEMAS
from sojourn.metrics.run.segments import STREAM, GrowingStream, conformed, read_segment, sources


@dataclass(slots=True)
class FileTail:
    """One file of a table. `batches`: its last rows, with the end of the last one of each batch."""

    path: Path
    stream: GrowingStream | None  # None: a finished file, which is read once
    is_read: bool = False
    batches: deque[tuple[int, pa.RecordBatch]] = field(default_factory=deque)

    def new(self, table: str) -> Iterator[pa.RecordBatch]:
        if self.stream is not None:
            for batch in self.stream.take():
                yield from conformed(pa.Table.from_batches([batch]), table).to_batches()
        elif not self.is_read:
            yield from read_segment(self.path, table).to_batches()
            self.is_read = True


class TableTail:
    """Owns the last rows of one table. `end_column`: when a row was over."""

    def __init__(self, directory: Path, table: str, end_column: str, keep_s: float):
        self._directory, self._table, self._end_column = directory, table, end_column
        self._keep_ns = int(keep_s * 1e9)
        self._newest_ns = 0
        self._files: dict[tuple[str, int], FileTail] = {}  # by name and inode: a table that is replaced is another one

    def read(self, end_ns: int | None = None) -> pa.Table:
        """The rows of the last `keep_s` seconds before a moment, or before the last row. Raises RunDataError."""
        try:
            files = {}
            for path in sources(self._directory, self._table):
                key = path.name, path.stat().st_ino
                stream = GrowingStream(path) if path.suffix == STREAM else None
                files[key] = self._files.get(key) or FileTail(path, stream)
            self._files = files
            for file in files.values():
                for batch in file.new(self._table):
                    self._keep(file, batch, end_ns)
        except FileNotFoundError:  # compacted meanwhile: the next reading finds the whole under its name
            pass
        except (pa.ArrowException, OSError, ValueError) as error:
            raise RunDataError(f"{self._directory}: table {self._table} cannot be read: {error}") from None
        begin_ns = self._begin_ns(end_ns)
        kept = [_since(batch, self._end_column, begin_ns) for file in self._files.values() for _, batch in file.batches]
        return pa.Table.from_batches(kept, SCHEMAS[self._table])

    def _keep(self, file: FileTail, batch: pa.RecordBatch, end_ns: int | None) -> None:
        last_ns = pc.max(batch[self._end_column]).as_py() or 0
        self._newest_ns = max(self._newest_ns, last_ns)
        begin_ns = self._begin_ns(end_ns)
        if last_ns >= begin_ns:
            file.batches.append((last_ns, _since(batch, self._end_column, begin_ns)))
        while file.batches and file.batches[0][0] < begin_ns:
            file.batches.popleft()

    def _begin_ns(self, end_ns: int | None) -> int:
        return (self._newest_ns if end_ns is None else end_ns) - self._keep_ns


def _since(rows: pa.RecordBatch, column: str, begin_ns: int) -> pa.RecordBatch:
    return rows.filter(pc.greater_equal(rows[column], pa.scalar(begin_ns, pa.int64())))
