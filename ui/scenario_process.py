"""A scenario that the app starts: `sojourn run` or `sojourn load` as a process of its own, one at a time."""

import atexit
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import pyarrow.parquet as pq
import yaml

from sojourn.live.watch.fetch import base_of
from sojourn.metrics.errors import InputError, RunDataError
from sojourn.metrics.installed import missing, say_missing
from sojourn.metrics.run.directory import RunDirectory

ROOT = Path(__file__).parents[1]
SCENARIOS = ROOT / "scenarios"
NEEDS = {"run": ("engine", "loadgen"), "load": ("loadgen",)}
STAGES = ("starting server", "preparing load", "sending", "stopping server", "gathering", "measuring normal speed")
STOP_TIMEOUT_S = 30  # an experiment that is stopped gathers its records first
LAST_BYTES = 20_000  # of the output, that are looked at


def bundled() -> dict[str, str]:
    """Scenarios that come with Sojourn: name → what it is."""
    found = {}
    for file in sorted(SCENARIOS.glob("*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "workload" in content:
            found[file.stem] = str(content.get("description", ""))
    return found


def why_not(verb: str) -> str:
    """Why a verb cannot be started, or ""."""
    lacking = missing(*NEEDS[verb])
    return f"{say_missing(lacking, f'`sojourn {verb}`')}." if lacking else ""


def command_of(
    scenario: str, run: Path, *, base_url: str = "", model: str = "", settings: str = "", seed: int | None = None
) -> list[str]:
    """The command line: `load` where a `base_url` is given, else `run`. `settings` are KEY=VALUE, one a line.

    Raises InputError for what the program would misread.
    """
    if not re.fullmatch(r"[\w.][\w.-]*", run.name) or run.name in (".", ".."):
        raise InputError(f"{run.name or 'an empty name'} is no name of a run; use letters, digits, dots and hyphens")
    if run.exists():
        raise InputError(f"there is a run {run.name} already; give another name")
    overrides = _overrides(settings)
    options = ["--output", str(run.resolve())]
    options += ["--seed", str(seed)] if seed is not None else []
    if base_url:
        base_of(base_url)
        if overrides:
            raise InputError("engine settings are of our own engine; leave them out for a server that runs already")
        options += ["--base-url", base_url, *([f"--model={model}"] if model else [])]
    else:
        options += [f"--set={line}" for line in ([f"model={model}"] if model else []) + overrides]
    return [sys.executable, "-m", "sojourn", "load" if base_url else "run", scenario, *options]


def _overrides(settings: str) -> list[str]:
    overrides = [line.strip() for line in settings.splitlines() if line.strip()]
    for line in overrides:
        if not re.match(r"[A-Za-z_][\w.]*=", line):
            raise InputError(f"{line} is no setting; write one KEY=VALUE a line, such as max_num_seqs=16")
    return overrides


@dataclass(slots=True)
class Started:
    """A process that was started, and what it has done so far."""

    run: Path
    command: list[str]
    process: subprocess.Popen
    output: IO[bytes]
    begun_s: float = field(default_factory=time.monotonic)
    ended_s: float | None = None
    is_stopping: bool = False

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        code = self.process.poll()
        if code is not None and self.ended_s is None:
            self.ended_s = time.monotonic()
        return code

    @property
    def seconds(self) -> float:
        return (time.monotonic() if self.ended_s is None else self.ended_s) - self.begun_s

    def lines(self, count: int = 15) -> list[str]:
        """The last lines that it printed."""
        size = os.fstat(self.output.fileno()).st_size
        text = os.pread(self.output.fileno(), LAST_BYTES, max(0, size - LAST_BYTES)).decode(errors="replace")
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]

    def stage(self) -> str:
        """Of STAGES, the one that it printed last; "starting" before the first."""
        return next((line for line in reversed(self.lines(200)) if line in STAGES), "starting")

    def requests(self) -> tuple[int, int]:
        """Requests that have ended, and all of the schedule; 0 where that is not known yet."""
        try:
            total = pq.ParquetFile(self.run / "schedule.parquet").metadata.num_rows
        except (OSError, ValueError):
            return 0, 0
        try:
            return min(RunDirectory(self.run).arrow("client").num_rows, total), total
        except RunDataError:
            return 0, total

    def stop(self) -> None:
        """As Ctrl-C does: it stops sending, ends its server, and gathers what was recorded."""
        self.is_stopping = True
        if self.exit_code is None:
            self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Ends it with all its processes; after STOP_TIMEOUT_S by force."""
        self.stop()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Launcher:
    """Starts scenarios, one at a time: a second load would be measured by the first."""

    def __init__(self) -> None:
        self.latest: Started | None = None
        self._lock = threading.Lock()
        atexit.register(self.close)

    @property
    def is_busy(self) -> bool:
        return self.latest is not None and self.latest.exit_code is None

    def start(self, command: list[str], run: Path) -> Started:
        """Raises InputError while another one runs."""
        with self._lock:
            if self.is_busy:
                raise InputError(f"{self.latest.run.name} is still running; wait for its end, or stop it")
            output = TemporaryFile()  # noqa: SIM115 (read for as long as the app shows it)
            path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
            environment = os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "COLUMNS": "110"}
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
            self.latest = Started(run, command, process, output)
            return self.latest

    def close(self) -> None:
        if self.is_busy:
            self.latest.close()
