"""What a replica needs to own a server as a child process."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)  # loaded here: nothing may be loaded in a child between fork and exec


def claim_number(folder: Path) -> int:
    """The first number that no other server has in this folder. Makes the folder `server-NUMBER`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in count():
        try:
            (folder / f"server-{number}").mkdir()
            return number
        except FileExistsError:
            continue
    raise AssertionError("numbers do not end")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def end_with_parent() -> Callable[[], None]:
    """For a child, between fork and exec: SIGTERM once the thread that started it is gone, even after a kill -9."""
    parent = os.getpid()

    def request() -> None:
        if sys.platform == "linux":
            _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            os._exit(1)

    return request


def end_group(leader: subprocess.Popen) -> None:
    """Kills what is left of a child and of the processes that it started; it leads a session of its own."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
