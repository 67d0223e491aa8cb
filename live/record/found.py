"""A server that runs already: by its process, its container or its unit. Each gives an address and, where there is one,
a log to follow."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from sojourn.live.record.command_line import KINDS, read_command
from sojourn.metrics.errors import InputError

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class FoundServer:
    """`log`: a file to follow, or a command that prints it; () where its output goes nowhere that can be read."""

    title: str
    url: str
    words: tuple[str, ...]  # of its command line; () where it is not known
    pid: int | None
    log: Path | tuple[str, ...]


def by_pid(pid: int, url: str | None = None) -> FoundServer:
    """Raises InputError where there is no such process, or it listens nowhere."""
    try:
        process = psutil.Process(pid)
        words = tuple(process.cmdline())
    except psutil.NoSuchProcess:
        raise InputError(f"there is no process {pid}") from None
    except psutil.AccessDenied:
        raise InputError(f"process {pid} is another user's: run as that user, or name --base-url") from None
    kind = next((each for each in KINDS if each.starts(words)), None)
    output = Path(f"/proc/{pid}/fd/1")
    log = output.resolve() if output.exists() and output.resolve().is_file() else ()
    return FoundServer(kind.title if kind else process.name(), url or _listens(process), words, pid, log)


def _listens(process: psutil.Process) -> str:
    """The address at which the process, or a child of it, listens. The lowest port: vLLM's and SGLang's inner ones are
    ephemeral."""
    found: list[tuple[int, str]] = []
    try:
        for each in [process, *process.children(recursive=True)]:
            for socket in each.net_connections(kind="tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    found.append((socket.laddr.port, socket.laddr.ip))
    except psutil.Error as error:
        raise InputError(f"the sockets of process {process.pid} cannot be read ({error}): name --base-url") from None
    if not found:
        raise InputError(f"process {process.pid} listens at no port yet: wait, or name --base-url")
    port, ip = min(found)
    host = "127.0.0.1" if ip in ("0.0.0.0", "::") else ip
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def by_container(name: str, url: str | None = None) -> FoundServer:
    """Raises InputError where docker or podman does not know it, or its port is not published."""
    program = next((each for each in ("docker", "podman") if _has(each)), None)
    if program is None:
        raise InputError("neither docker nor podman is installed here: name --base-url, and --log for its log")
    told = _told([program, "inspect", name])
    try:
        [content] = json.loads(told)
        config = content["Config"]
        words = (*(config.get("Entrypoint") or ()), *(config.get("Cmd") or ()))
        pid = int(content["State"].get("Pid") or 0) or None
        ports = content["NetworkSettings"].get("Ports") or {}
        is_on_host = (content.get("HostConfig") or {}).get("NetworkMode") == "host"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{program} describes {name} in an unknown form ({error!r}): name --base-url") from None
    kind = next((each for each in KINDS if each.starts(words)), None)
    address = url or (read_command(words).url if is_on_host else _published(name, ports))
    return FoundServer(kind.title if kind else name, address, words, pid, (program, "logs", "--follow", name))


def _published(name: str, ports: dict[str, list[dict[str, str]] | None]) -> str:
    found = [each["HostPort"] for given in ports.values() for each in given or ()]
    if not found:
        raise InputError(f"the container {name} publishes no port: name its address with --base-url")
    return f"http://127.0.0.1:{min(found, key=int)}"


def by_unit(name: str, url: str | None = None) -> FoundServer:
    """Raises InputError where systemd does not know it, or it does not run."""
    if not _has("systemctl"):
        raise InputError("systemd does not run here: name --base-url, and --log for the log")
    told = _told(["systemctl", "show", "--property=MainPID", "--value", name]).strip()
    if not told.isdigit() or told == "0":
        raise InputError(f"the unit {name} does not run: systemctl status {name}")
    found = by_pid(int(told), url)
    return FoundServer(found.title, found.url, found.words, found.pid, ("journalctl", "-fu", name, "-o", "cat"))


def _has(program: str) -> bool:
    from shutil import which

    return which(program) is not None


def _told(words: Sequence[str]) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{' '.join(words)} gives no answer ({error})") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        raise InputError(f"{' '.join(words)}: {last}")
    return done.stdout
