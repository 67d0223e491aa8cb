"""The last seconds of what a server records on this host, diagnosed as a run: our own engine's, or a probe's."""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from sojourn.diagnosis.diagnose import diagnose
from sojourn.diagnosis.expectation import with_expectation
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.interop.probe.folder import run_of
from sojourn.interop.probe.stream import is_probe_folder
from sojourn.interop.probe.tail import ProbeTail
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import replace_table
from sojourn.metrics.run.tail import TableTail

ENDS = {"requests": "finished_ns", "steps": "end_ns", "system": "ns"}  # table → when a row of it was over
FEWEST = 5  # requests that ended in the window: a diagnosis of fewer says little
READING_S = 10.0  # that a client may still read an answer after the last token of the engine


@dataclass(frozen=True, slots=True)
class Reading:
    """The records of a stretch of time that ended when they were read, diagnosed."""

    begin_ns: int
    read_ns: int
    newest_ns: int  # when the last request of them ended
    requests: int
    diagnosis: Diagnosis | None  # None where too few requests ended

    def words(self, now_ns: int) -> str:
        """Which records they are, and how fresh."""
        seconds, age_s = (self.read_ns - self.begin_ns) / 1e9, max(0.0, (now_ns - self.newest_ns) / 1e9)
        return f"records of {self.requests:,} requests in {seconds:.0f} s, the newest {age_s:.0f} s old"


class Records:
    """Owns what was read of a folder of records: a run directory of our server, or the streams of a probe."""

    def __init__(self, folder: Path | str, window_s: float):
        self.folder, self._window_s = Path(folder), window_s
        self._probe = ProbeTail(self.folder, window_s + READING_S)
        self._tables = {name: TableTail(self.folder, name, column, window_s) for name, column in ENDS.items()}

    def read(self, objectives: Mapping[str, float], less_s: float = 0.0, since_ns: int = 0) -> Reading:
        """The diagnosis of the window, without its first `less_s` seconds and what was before `since_ns`.

        `objectives` replace those of the record where there are some. Raises RunDataError.
        """
        meta, whole = self._read()
        ended = whole["requests"]
        read_ns = _end_ns(ended) if ended.num_rows else time.monotonic_ns()
        begin_ns = max(since_ns, read_ns - int((self._window_s - less_s) * 1e9))
        tables = {name: _since(whole[name], column, begin_ns) for name, column in ENDS.items()}
        requests = tables["requests"]
        newest_ns = (pc.max(requests["finished_ns"]).as_py() or begin_ns) if requests.num_rows else begin_ns
        found = None if requests.num_rows < FEWEST else self._diagnose(meta, tables, objectives)
        return Reading(begin_ns, read_ns, newest_ns, requests.num_rows, found)

    def _diagnose(
        self, meta: dict[str, Any], tables: Mapping[str, pa.Table], objectives: Mapping[str, float]
    ) -> Diagnosis:  # fmt: skip
        if objectives:
            meta = meta | {"objectives": [{"klass": "all", "source": "--slo", **objectives}]}
        with tempfile.TemporaryDirectory(prefix="sojourn-watch-") as place:
            window = RunDirectory.create(Path(place) / self.folder.name, meta)
            try:
                for name, rows in tables.items():
                    replace_table(window.path / f"{name}.parquet", rows)
            except (OSError, pa.ArrowException) as error:
                raise RunDataError(f"the window of {self.folder} cannot be written to {place}: {error}") from None
            return diagnose(with_expectation(window))

    def _read(self) -> tuple[dict[str, Any], Mapping[str, pa.Table]]:
        if is_probe_folder(self.folder):
            return run_of(self.folder, self._probe.read())
        meta = RunDirectory.open(self.folder).meta()
        ended = self._tables["requests"].read()
        end_ns = _end_ns(ended)
        others = {name: self._tables[name].read(end_ns) for name in ENDS if name != "requests"}
        return meta, {"requests": ended, **others}


def _end_ns(ended: pa.Table) -> int:
    """Now, or the end of the last request where that is later: then its clock is of another host or another boot."""
    return max(time.monotonic_ns(), pc.max(ended["finished_ns"]).as_py() or 0)


def _since(rows: pa.Table, column: str, begin_ns: int) -> pa.Table:
    if not rows.num_rows:
        return rows
    return rows.filter(pc.greater_equal(rows[column], pa.scalar(begin_ns, pa.int64())))
