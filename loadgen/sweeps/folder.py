"""A search on disk: its parameters and every finished run, so that the same command resumes it."""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from sojourn.loadgen.search.points import Point, Search, read_search
from sojourn.metrics.compare.settings import differences
from sojourn.metrics.errors import ExperimentError
from sojourn.metrics.whole_file import write_whole

OnNote = Callable[[str], None]  # a sentence for the user: earlier runs, what is odd about a run
RUN_FOLDER = re.compile(r"rate-[0-9.e+-]+-\d+")


class SearchFolder:
    """The folder of one search: its document, and a run directory for each point. Locked for as long as it is used."""

    def __init__(self, path: Path, kind: str, plan: dict[str, Any]):
        """Starts a search, or resumes it. Raises ExperimentError if the folder has another one, with the differences,
        or this one is in progress. Removes runs to measure again: those cut short or not valid, or all if no request
        was ever served."""
        self.path, self._file = path, path / f"{kind}.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise ExperimentError(f"{path} cannot be used: {error.strerror}; choose another folder") from None
        try:
            self._lock_or_refuse(kind)
            self.document = self._document(kind, msgspec.json.decode(msgspec.json.encode(plan)))
        except BaseException:
            self.close()
            raise
        self.num_dropped = self._drop_unusable()

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

    def _document(self, kind: str, plan: dict[str, Any]) -> Search:
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
        return self.document.points

    def run_path(self, rate_rps: float, repeat: int) -> Path:
        return self.path / f"rate-{rate_rps:.6g}-{repeat}"

    def next_seed(self) -> int:
        """A seed that no run of this search started with. A server that keeps running has the prompts of all of them,
        also of those that were cut short or are measured again."""
        self.document.runs_begun += 1
        self.write()
        return self.document.plan["seed"] + self.document.runs_begun - 1

    def earlier_runs(self, of: int | None = None) -> str:
        """The earlier runs: how many, from when, and how to measure again. "" if there are none."""
        starts_ns = [point.begun_unix_ns for point in self.points if point.begun_unix_ns is not None]
        date = f" from {time.strftime('%Y-%m-%d %H:%M', time.localtime(min(starts_ns) / 1e9))}" if starts_ns else ""
        count = f"{len(self.points)}{f' of {of}' if of else ''} run{'s' if (of or len(self.points)) > 1 else ''}"
        dropped = f"{self.num_dropped} gave no result and are measured again" if self.num_dropped else ""
        if not self.points:
            return dropped
        running = self.document.plan.get("target", {}).get("base_url")
        anew = " and give another --seed, for the server has seen these prompts," if running else ""
        return f"{count} kept{date}{f'; {dropped}' if dropped else ''}; remove {self.path}{anew} to measure again"

    def resume(self, on_note: OnNote, of: int | None = None) -> None:
        """Says what was there already, and writes the document."""
        if earlier := self.earlier_runs(of):
            on_note(earlier)
        self.write()

    def add(self, point: Point, on_note: OnNote = lambda _: None, *sentences: str) -> None:
        """Adds a finished run, and says what is odd about it."""
        self.document.points.append(point)
        self.write()
        for note in (*sentences, *point.notes):
            on_note(note)

    def finish(self, result: dict[str, Any]) -> None:
        self.document.result = result
        self.write()

    def write(self) -> None:
        write_whole(self._file, msgspec.json.format(msgspec.json.encode(self.document), indent=2) + b"\n")

    def _drop_unusable(self) -> int:
        """Returns the number of removed points. A warm-up stays: it is not measured."""
        served = any(point.completed for point in self.points)
        telling = [point for point in self.points if served and (point.counts or point.warm_up)]
        dropped = len(self.points) - len(telling)
        self.document.points = telling
        finished = {point.run for point in telling}
        for folder in self.path.iterdir():
            if RUN_FOLDER.fullmatch(folder.name) and folder.name not in finished:
                shutil.rmtree(folder)
        return dropped
