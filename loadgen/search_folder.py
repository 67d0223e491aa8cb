"""A search on disk: what was asked for and every finished run of it, so that the same command goes on where it was."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from loadgen.processes import ExperimentError
from metrics.differences import differences
from metrics.search_file import Search, read_search
from metrics.search_points import Point

RUN_FOLDER = re.compile(r"rate-[0-9.e+-]+-\d+")


class SearchFolder:
    """The folder of one search: its document, and a run directory for each point."""

    def __init__(self, path: Path, kind: str, plan: dict[str, Any]):
        """Begins a search, or goes on with it. Raises ExperimentError if another one lives there, saying what differs;
        runs that were cut short are removed, for they are made again."""
        self.path, self._file = path, path / f"{kind}.json"
        plan = msgspec.json.decode(msgspec.json.encode(plan))
        self.search = Search(kind=kind, plan=plan)
        if self._file.exists():
            self.search = read_search(self._file)
            if different := differences(self.search.plan, plan):
                raise ExperimentError(
                    f"{path} holds another {kind}: {'; '.join(different)}; choose another folder, or remove it first"
                )
        elif path.is_dir() and any(path.iterdir()):
            raise ExperimentError(f"{path} is not empty and holds no {kind}; choose another folder, or remove it first")
        self._remove_unfinished()

    @property
    def points(self) -> list[Point]:
        return self.search.points

    def run_path(self, rate_rps: float, repeat: int) -> Path:
        return self.path / f"rate-{rate_rps:.6g}-{repeat}"

    def add(self, point: Point) -> None:
        self.search.points.append(point)
        self.write()

    def finish(self, result: dict[str, Any]) -> None:
        self.search.result = result
        self.write()

    def write(self) -> None:
        """All or nothing."""
        self.path.mkdir(parents=True, exist_ok=True)
        partial = self.path / f".{self._file.name}.tmp"
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self.search), indent=2) + b"\n")
        os.replace(partial, self._file)

    def _remove_unfinished(self) -> None:
        finished = {point.run for point in self.points}
        for folder in self.path.iterdir() if self.path.is_dir() else ():
            if RUN_FOLDER.fullmatch(folder.name) and folder.name not in finished:
                shutil.rmtree(folder)
