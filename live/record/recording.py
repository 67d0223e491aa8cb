"""One run of a server: its pages, its log and, where it can be, the probe's records, in one folder.

With the probe the folder is the probe's, and a run directory once it is read. Without it, it is what a watch records.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sojourn.interop.probe.folder import open_server_run
from sojourn.interop.probe.stream import is_probe_folder
from sojourn.live.record.command_line import ServerCommand, with_metrics, with_probe, without_secrets
from sojourn.live.record.found import FoundServer
from sojourn.live.record.log import LogFollower
from sojourn.live.record.probe import probe_path, with_path
from sojourn.live.sensors.feed import SensorFeed
from sojourn.live.watch.recorder import Recorders
from sojourn.live.watch.watcher import Watcher
from sojourn.metrics.errors import RunDataError, ServerError
from sojourn.metrics.run.directory import RunDirectory

LOG = "server.log"
VISIBLE = "CUDA_VISIBLE_DEVICES"
END_S = 30.0  # that a server gets to end by itself
LAST_LINES = 12  # of a log, that are shown where a server ended without an answer


@dataclass(frozen=True, slots=True)
class Finished:
    """How a recording ended. `run` is None where the server never answered, and `exit_code` where it runs on."""

    run: RunDirectory | None
    exit_code: int | None
    log: Path | None
    problems: list[str]


class Recording:
    """Owns the watcher, the log's follower and the process, if it started one."""

    def __init__(
        self, folder: Path, objectives: Mapping[str, float], window_s: float,
        show: Callable[[bytes], None] = lambda _: None, sensors: SensorFeed | None = None,
    ):  # fmt: skip
        """`folder`: the run's. `show` gets what the server says. `sensors` are read beside
        it. Raises RunDataError where a run lives there."""
        if (folder / "run.json").exists() or is_probe_folder(folder):
            raise RunDataError(f"{folder} already holds a run; choose another folder with --output")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDataError(f"{folder} cannot be made: {error.strerror}") from None
        self.folder = folder
        self.process: subprocess.Popen | None = None
        self.notes: list[str] = []  # sentences: what is not recorded, and why
        self._objectives, self._window_s = dict(objectives), window_s
        self._log = LogFollower(folder / LOG, show)
        self._sensors = sensors
        self._watcher: Watcher | None = None
        self._recorders: Recorders | None = None

    def start(self, command: ServerCommand, uses_probe: bool) -> None:
        """Starts a server. Raises ServerError where it cannot be started, InputError for flags in the probe's way."""
        command = with_metrics(command)
        environment = dict(os.environ)
        if uses_probe and command.kind is not None and command.kind.takes_probe:
            path = probe_path(command.words)
            if path is None:
                self.notes.append(f"without the probe: {command.title}'s Python lacks it. In that environment: "
                                  "pip install ./probe, from a checkout of Sojourn")  # fmt: skip
            else:
                command = with_probe(command)
                environment = with_path(environment, path) | self._probe_variables()
        environment.setdefault("PYTHONUNBUFFERED", "1")  # else a log comes in blocks
        try:
            self.process = subprocess.Popen(
                command.words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise ServerError(f"{command.words[0]} cannot be started: {error.strerror}") from None
        self._log.follow(self.process.stdout)  # type: ignore[arg-type]
        self._watch(command.url, {"command": without_secrets(command.words), "pid": self.process.pid}, environment)

    def find(self, found: FoundServer) -> None:
        """Follows a server that runs. Raises InputError for an address that is none."""
        if found.log:
            self._log.follow(found.log)
        else:
            self.notes.append("without a log: the server's output goes nowhere that can be read; name it with --log")
        of_server = _environment_of(found.pid) if found.pid is not None else {}
        self._watch(found.url, {"command": without_secrets(found.words), "pid": found.pid}, of_server)

    @property
    def is_over(self) -> bool:
        """Whether the server that was started has ended."""
        return self.process is not None and self.process.poll() is not None

    @property
    def has_answered(self) -> bool:
        """Whether a page of the server was read. Before that a server that starts is no news."""
        return self._recorders is not None and self._recorders.has_runs

    def news(self, number: int) -> tuple[list[Any], int]:
        """What the watch has said after so many changes, and how many there are now."""
        assert self._watcher is not None, "start or find comes first"
        return self._watcher.changes_after(number)

    def end(self) -> Finished:
        """Ends the server, if this started it, reads the rest of its log, and closes the run. Raises RunDataError."""
        if self._watcher is not None:
            self._watcher.stop()  # before the server: pages that fail because it is ended here are no news of it
        exit_code = self._end_process()
        self._log.stop()
        log = self.folder / LOG
        problems = [*self.notes, *self._recorders.problems] if self._recorders else list(self.notes)
        problems += [self._watcher.record_problem] if self._watcher and self._watcher.record_problem else []
        problems += self._sensors.problems if self._sensors else []
        if self._log.lost_bytes:
            problems.append(f"{self._log.lost_bytes:,} bytes of the log could not be written")
        runs = self._recorders.close() if self._recorders else []
        run = runs[0] if runs else None
        if is_probe_folder(self.folder):
            try:
                run = open_server_run(self.folder)
            except RunDataError as error:
                problems.append(f"the probe's records cannot be read: {error}")
        return Finished(run, exit_code, log if log.exists() and log.stat().st_size else None, problems)

    def _watch(self, url: str, stated: dict[str, Any], environment: Mapping[str, str]) -> None:
        if self._sensors is not None and VISIBLE in environment:
            self._sensors.narrow(environment[VISIBLE])
        said = {"recorded": stated} | (self._sensors.stated() if self._sensors else {})
        self._recorders = Recorders(self.folder.parent, self._objectives, self.folder.name, said)
        self._watcher = Watcher(
            [url], self._objectives, window_s=self._window_s, record=self._recorders, sensors=self._sensors
        ).start()

    def _probe_variables(self) -> dict[str, str]:
        bounds = ",".join(f"{name}={value:g}" for name, value in self._objectives.items())
        return {"SOJOURN_PROBE": str(self.folder.resolve()), "SOJOURN_PROBE_OBJECTIVES": bounds}

    def _end_process(self) -> int | None:
        """Ctrl-C in a terminal has reached the server, too: it is asked once more only where it goes on."""
        if self.process is None:
            return None
        for number in (None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self.process.send_signal(number)
            try:
                return self.process.wait(1.0 if number is None else END_S)
            except subprocess.TimeoutExpired:
                continue
        return self.process.wait()


def _environment_of(pid: int) -> dict[str, str]:
    """Of a process; {} where it is another user's."""
    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return {}


def last_lines(log: Path) -> str:
    """The end of a log, for a server that ended before it answered."""
    text = log.read_bytes()[-20_000:].decode("utf-8", "replace")
    return "\n".join(text.splitlines()[-LAST_LINES:])


def default_folder(title: str) -> Path:
    return Path("runs") / f"{title.lower().replace('.', '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
