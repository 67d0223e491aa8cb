"""A search on disk: what was asked for and every finished run of it, so that the same command goes on where it was."""

import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import msgspec

from metrics.compare.runs import differences
from metrics.errors import ExperimentError
from metrics.search.points import Point, Search, read_search

RUN_FOLDER = re.compile(r"rate-[0-9.e+-]+-\d+")


class SearchFolder:
    """The folder of one search: its document, and a run directory for each point. Locked for as long as it is used."""

    def __init__(self, path: Path, kind: str, plan: dict[str, Any]):
        """Begins a search, or goes on with it. Raises ExperimentError if another one lives there, saying what differs,
        or this one is under way. What has to be measured again is removed: runs that were cut short or not valid, and
        all of a search in which no request was ever served."""
        self.path, self._file = path, path / f"{kind}.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ExperimentError(f"{path} cannot be used: {error.strerror}; choose another folder") from None
        try:
            self._lock_or_refuse(kind)
            self.search = self._search(kind, msgspec.json.decode(msgspec.json.encode(plan)))
        except BaseException:
            self.close()
            raise
        self.num_dropped = self._drop_what_tells_nothing()
        self._remove_unfinished()

    def __enter__(self) -> "SearchFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._lock)

    def _lock_or_refuse(self, kind: str) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ExperimentError(
                f"another {kind} is under way in {self.path}; wait for its end, or choose another folder"
            ) from None

    def _search(self, kind: str, plan: dict[str, Any]) -> Search:
        if not self._file.exists():
            if any(self.path.iterdir()):
                raise ExperimentError(
                    f"{self.path} is not empty and holds no {kind}; choose another folder, or remove it first"
                )
            return Search(kind=kind, plan=plan)
        found = read_search(self._file)
        if different := differences(found.plan, plan):
            raise ExperimentError(
                f"{self.path} holds another {kind}: {'; '.join(different)}; choose another folder, or remove it first"
            )
        return found

    @property
    def points(self) -> list[Point]:
        return self.search.points

    def run_path(self, rate_rps: float, repeat: int) -> Path:
        return self.path / f"rate-{rate_rps:.6g}-{repeat}"

    def next_seed(self) -> int:
        """A seed that no run of this search was begun with. A server that runs on knows the prompts of all of them,
        also of those that were cut short or are measured again."""
        self.search.runs_begun += 1
        self.write()
        return self.search.plan["seed"] + self.search.runs_begun - 1

    def kept(self, of: int | None = None) -> str:
        """What was there already: how much of how many runs, of when, and how to measure it again. "" where nothing."""
        begun = [point.begun_unix_ns for point in self.points if point.begun_unix_ns is not None]
        date = f" from {time.strftime('%Y-%m-%d %H:%M', time.localtime(min(begun) / 1e9))}" if begun else ""
        count = f"{len(self.points)}{f' of {of}' if of else ''} run{'s' if (of or len(self.points)) > 1 else ''}"
        dropped = f"{self.num_dropped} told nothing and are measured again" if self.num_dropped else ""
        if not self.points:
            return dropped
        running = self.search.plan.get("target", {}).get("base_url")
        anew = " and give another --seed, for the server has seen these prompts," if running else ""
        return f"{count} kept{date}{f'; {dropped}' if dropped else ''}; remove {self.path}{anew} to measure again"

    def add(self, point: Point) -> None:
        self.search.points.append(point)
        self.write()

    def finish(self, result: dict[str, Any]) -> None:
        self.search.result = result
        self.write()

    def write(self) -> None:
        """All or nothing."""
        partial = self.path / f".{self._file.name}.tmp"
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(self.search), indent=2) + b"\n")
        os.replace(partial, self._file)

    def _drop_what_tells_nothing(self) -> int:
        """How many points went. A warm-up stays, whatever came of it: it is not measured."""
        served = any(point.completed for point in self.points)
        telling = [point for point in self.points if served and (point.tells or point.warm_up)]
        dropped = len(self.points) - len(telling)
        self.search.points = telling
        return dropped

    def _remove_unfinished(self) -> None:
        finished = {point.run for point in self.points}
        for folder in self.path.iterdir():
            if RUN_FOLDER.fullmatch(folder.name) and folder.name not in finished:
                shutil.rmtree(folder)
