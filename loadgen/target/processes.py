"""Child processes: a server that must become ready and end cleanly, and the load generator."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sojourn.loadgen.target.endpoint import Endpoint, EndpointError, get
from sojourn.metrics.errors import ExperimentError, ServerError

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
QUOTED_LOG_LINES = 15
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # loaded here: nothing may be loaded in a child between fork and exec


class ServerDied(ServerError):
    """Our server ended during the load. The run is kept, up to then."""


def free_port() -> int:
    """A port that no process listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve_words(settings: dict[str, Any]) -> list[str]:
    """`sojourn serve` for the engine block of a scenario, without address and run directory: one flag a key, and of a
    list one for each of its texts. `serve` checks the values."""
    flags: list[str] = []
    for key, value in settings.items():
        flag = key.replace("_", "-")
        if key in ("model", "host", "port", "run_dir") or value is None:  # None is the default of what it stands for
            continue
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [
                part for each in (value if isinstance(value, list) else [value]) for part in (f"--{flag}", str(each))
            ]
    if "spare_core" not in settings:  # its start would take a second of CPU time in the middle of a measurement
        flags.append("--no-spare-core")
    return [sys.executable, "-m", "sojourn", "serve", str(settings["model"]), *flags]


def has_records(settings: dict[str, Any]) -> bool:
    """Without telemetry a server has nothing to record, and refuses a run directory."""
    return settings.get("telemetry") != "off"


def serve_command(settings: dict[str, Any], port: int, run_dir: Path | None) -> list[str]:
    """`sojourn serve` on the loopback. With a run directory it records what it has to record."""
    command = [*serve_words(settings), "--host", "127.0.0.1", "--port", str(port)]
    return command + (["--run-dir", str(run_dir)] if run_dir is not None and has_records(settings) else [])


def load_command(scenario_file: str, base_url: str, run_dir: Path, options: dict[str, Any]) -> list[str]:
    """Locust, headless, on our locustfile; an option that is None is left out."""
    arguments = {"scenario": scenario_file, "host": base_url, "run-dir": run_dir, **options}
    if arguments.get("processes"):
        port = free_port()  # Locust's own is one for all runs of a machine
        arguments |= {"master-host": "127.0.0.1", "master-port": port, "master-bind-host": "127.0.0.1"}
        arguments["master-bind-port"] = port
    flags = [str(part) for name, value in arguments.items() if value is not None for part in (f"--{name}", value)]
    return [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary", *flags]


def start(command: list[str], log: Path, environment: dict[str, str] | None = None) -> subprocess.Popen:
    """Starts a child that logs to `log`, in a session of its own: Ctrl-C does not reach it, we end it in order.

    On Linux it gets SIGTERM when the thread that started it is gone, even after a kill -9.
    """
    parent = os.getpid()
    with log.open("ab") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            preexec_fn=(lambda: end_with(parent)) if sys.platform == "linux" else None,
        )  # fmt: skip


def end_with(parent: int) -> None:
    """Requests SIGTERM from the kernel for the death of that parent. Runs between fork and exec: one system call, no
    lock."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != parent:  # it died before it could be watched
        os._exit(1)


def wait_ready(
    server: subprocess.Popen, endpoint: Endpoint, log: Path, still_waiting: Callable[[], None] = lambda: None
) -> None:
    """Returns once GET /ready says 200. Raises ExperimentError if the server exits first, or takes too long."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ExperimentError(
                f"the server ended with exit code {server.returncode} before it was ready; its last lines:\n{tail(log)}"
            )
        with suppress(EndpointError):
            if get(endpoint, "/ready", timeout_s=2.0)[0] == 200:
                return
        still_waiting()
        time.sleep(0.2)
    raise ExperimentError(f"the server was not ready within {READY_TIMEOUT_S:.0f} s; its last lines:\n{tail(log)}")


def stop(process: subprocess.Popen) -> None:
    """SIGTERM, then SIGKILL for the whole group of processes that it started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)  # the group is the child's own: it leads its session
    process.wait()


def tail(log: Path) -> str:
    """The last lines of a log, for a quotation."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return "\n".join(f"  {line}" for line in lines[-QUOTED_LOG_LINES:]) or "  (it said nothing)"
