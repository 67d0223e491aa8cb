"""What a watch reads, written as it comes: a run directory for each server, which can be read while it grows."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from sojourn.live.sensors.feed import SensorWriter
from sojourn.live.watch.recorded import recorded_meta
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import write_segment

FLUSH_S = 5.0  # a killed watch loses so much


class Recorder:
    """Owns one run directory. `add` is called by one thread."""

    def __init__(
        self, path: Path, url: str, objectives: Mapping[str, float], is_wall_clock: bool = False,
        stated: Mapping[str, Any] | None = None,
    ):  # fmt: skip
        """`stated`: what else run.json shall say. Raises RunDataError where a run lives there already, or nothing can
        be written."""
        self.path = path
        self._rows: list[dict[str, Any]] = []
        self._flushed_s = time.monotonic()
        self._sensors = SensorWriter(path, is_wall_clock=is_wall_clock)
        self.problem = ""  # why the last rows could not be written; they are lost
        try:
            self._run = RunDirectory.create(path, recorded_meta(url, objectives, is_wall_clock) | dict(stated or {}))
        except OSError as error:
            raise RunDataError(f"{path} cannot be written: {error.strerror}") from None

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """The rows of one scrape, also of one that failed."""
        self._rows += rows
        if time.monotonic() - self._flushed_s >= FLUSH_S:
            self.flush()

    def add_sensors(self, rows: Sequence[dict[str, Any]]) -> None:
        """Rows of the table `sensors` by the monotonic clock; called by other threads."""
        self._sensors.add(rows)

    def flush(self) -> None:
        rows, self._rows, self._flushed_s = self._rows, [], time.monotonic()
        if not rows:
            return
        try:
            write_segment(self.path, "scrapes", rows, f"{time.time_ns():020d}-{os.getpid()}")
            self.problem = ""
        except (OSError, pa.ArrowException) as error:  # a full disk: the watch goes on
            self.problem = f"{self.path} cannot be written: {error}"

    @property
    def problems(self) -> tuple[str, str]:
        """Of scrapes and of sensors; "" where there is none."""
        return self.problem, self._sensors.problem

    def close(self) -> RunDirectory:
        """Writes the rest, and makes one file of all segments. Raises RunDataError."""
        self.flush()
        self._sensors.flush()
        try:
            self._run.compact()
        except (OSError, pa.ArrowException) as error:
            raise RunDataError(f"{self.path} cannot be written: {error}") from None
        return self._run


class Recorders:
    """A recorder for each server, in a folder of runs. It begins with the server's first page."""

    def __init__(
        self, folder: Path, objectives: Mapping[str, float], name: str = "", stated: Mapping[str, Any] | None = None
    ):
        """`name`: of the run of the only server. `stated`: what else run.json shall say."""
        self.folder, self._objectives = folder, dict(objectives)
        self._name, self._stated = name, dict(stated or {})
        self._began = time.strftime("%Y%m%d-%H%M%S")
        self._by_name: dict[str, Recorder] = {}

    def add(
        self, name: str, url: str, rows: Sequence[dict[str, Any]], *, answered: bool = True, is_wall_clock: bool = False
    ) -> None:
        """The rows of one scrape. One that failed is left out before the first that is answered. Raises RunDataError
        where the run cannot be made."""
        if name not in self._by_name:
            if not answered:
                return
            host = re.sub(r"\W+", "-", name.removeprefix("http://").removeprefix("https://")).strip("-")
            path = self.folder / (self._name or f"live-{self._began}-{host}")
            self._by_name[name] = Recorder(path, url, self._objectives, is_wall_clock, self._stated)
        self._by_name[name].add(rows)

    def add_sensors(self, rows: Sequence[dict[str, Any]]) -> None:
        """Into each run that has begun: of several servers nobody knows whose devices they are."""
        for each in list(self._by_name.values()):
            each.add_sensors(rows)

    def close(self) -> list[RunDirectory]:
        """The runs. Raises RunDataError."""
        return [each.close() for each in self._by_name.values()]

    @property
    def has_runs(self) -> bool:
        return bool(self._by_name)

    @property
    def problems(self) -> list[str]:
        found = [problem for each in self._by_name.values() for problem in each.problems]
        return [each for each in found if each]
