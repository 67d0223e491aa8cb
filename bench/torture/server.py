"""A real server in a process group of its own, what it uses, and an end that leaves no process behind."""

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from bench.torture.promises import TortureError

ROOT = Path(__file__).parent.parent.parent
START_SECONDS = 120
_LISTENS = re.compile(r"listens on (http://\S+)")
_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl(2)
_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process holds."""

    rss_bytes: int
    num_fds: int
    num_threads: int


class Server:
    """`sojourn serve`. Make it with `serving`, which ends it."""

    def __init__(self, process: subprocess.Popen, log: Path):
        self.process = process
        self.log = log
        self.url = ""

    @property
    def front_pid(self) -> int:
        return self.process.pid

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port

    def group(self) -> list[int]:
        """The living processes of its session: the front, the core, workers. Also after the front is dead."""
        return session_members(self.process.pid)

    def core_pid(self) -> int | None:
        """The process that computes: the child of the front with the most memory. A spare core holds no model."""
        cores = []
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.Error):
                    if "sojourn.engine.core" in " ".join(child.cmdline()):
                        cores.append((child.memory_info().rss, child.pid))
        return max(cores)[1] if cores else None

    def usage(self, pid: int | None = None) -> Usage:
        """Of the front, or of `pid`."""
        process = psutil.Process(pid or self.process.pid)
        with process.oneshot():
            return Usage(process.memory_info().rss, process.num_fds(), process.num_threads())

    def get(self, path: str, timeout_s: float = 10) -> httpx.Response | None:
        """None where no answer comes."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(self.url + path, timeout=timeout_s)
        return None

    def status(self, path: str, timeout_s: float = 10) -> int | None:
        answer = self.get(path, timeout_s)
        return answer.status_code if answer is not None else None

    def metric(self, name: str) -> float:
        """The sum over all samples of that name. Raises TortureError if there is none."""
        return sum(self.samples(name).values())

    def samples(self, name: str) -> dict[str, float]:
        """Labels, as they are written, and values. Raises TortureError if there is none."""
        answer = self.get("/metrics", 30)
        page = answer.text if answer is not None else ""
        found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", page, re.MULTILINE)
        if not found:
            raise TortureError(f"/metrics has no {name}")
        return {labels: float(value) for labels, value in found}

    def text(self) -> str:
        """What it wrote to its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def send_signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """The exit code, or None if it still runs after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(timeout_s)
        return None

    def wait_ready(self, timeout_s: float = START_SECONDS) -> float:
        """Seconds until `/ready` says 200. Raises TortureError if it does not."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if self.process.poll() is not None:
                raise TortureError(f"the server ended with {self.process.returncode}: {self.text()[-2000:]}")
            if not self.url and (listens := _LISTENS.search(self.text())):
                self.url = listens[1]
            if self.url and self.status("/ready", 2) == 200:
                return time.monotonic() - started
            time.sleep(0.05)
        raise TortureError(f"the server is not ready in {timeout_s} s: {self.text()[-2000:]}")

    def kill_all(self) -> None:
        """Ends every process of the session, whatever state it is in."""
        deadline = time.monotonic() + 20
        while (members := self.group()) or self.process.poll() is None:
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > deadline:
                raise TortureError(f"processes {members} do not end")
            time.sleep(0.02)


@contextlib.contextmanager
def serving(
    *options: str,
    model: str = "tiny-model",
    wait_ready: bool = True,
    environment: dict[str, str] | None = None,
    limits: Callable[[], None] | None = None,
) -> Iterator[Server]:
    """A server until the block ends, on a free port of the loopback.

    `limits` runs in the new process before the server, for resource limits. At the end nothing of its session lives;
    the server is ended by SIGKILL, so a script that tests its end signals it before.
    """
    with temporary_folder() as folder:
        log = folder / "server.log"
        command = [sys.executable, "-m", "sojourn", "serve", model, "--port", "0", "--threads", "1", *options]
        server = Server(start_session(command, log, environment, limits), log)
        try:
            if wait_ready:
                server.wait_ready()
            yield server
        finally:
            server.kill_all()


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def start_session(
    command: list[str],
    log: Path,
    environment: dict[str, str] | None = None,
    limits: Callable[[], None] | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
) -> subprocess.Popen:
    """A process in a session of its own. It gets SIGKILL when this process dies, so that no end leaves it behind."""

    def before() -> None:
        _libc.prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if limits is not None:
            limits()

    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=stdin, stdout=output if stdout is None else stdout, stderr=output, cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}), start_new_session=True,
            preexec_fn=before,
        )  # fmt: skip


def session_members(session: int) -> list[int]:
    """The living processes of a session; zombies are dead."""
    members = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
    return members


def descendants(pid: int) -> list[psutil.Process]:
    """The processes that a process started, and those that they started, in whatever session they are."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def living(processes: list[psutil.Process]) -> list[int]:
    """The ids of those that still live; zombies are dead."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


def wait_until(condition: Callable[[], object], timeout_s: float, step_s: float = 0.02) -> float | None:
    """Seconds until `condition` was true, or None if it was not within that time."""
    started = time.monotonic()
    while time.monotonic() - started < timeout_s:
        if condition():
            return time.monotonic() - started
        time.sleep(step_s)
    return None
