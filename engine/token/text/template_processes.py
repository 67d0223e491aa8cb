"""The processes that render chat templates: few, started when needed, used again, replaced when a template ends one."""

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import weakref
from functools import cache
from typing import Any

from sojourn.engine.token.text.template_worker import LENGTH, TOO_MUCH_MEMORY, received

WORKERS = 2  # so that one slow template does not hold up all others
WAIT_SECONDS = 30  # wall time, for a free process and for its answer: a busy machine may leave it without CPU time
_PASSED_ON = ("PYTHON", "PATH", "LD_", "DYLD_", "LANG", "LC_", "TZ")  # of the environment: no keys, no tokens


class TooMuchWork(Exception):
    """The template took more time or memory than it may."""


class Busy(Exception):
    """No process answered in time, and no template is known to be the reason."""


class TemplateProcesses:
    """Owns the processes of this one. Threads share them. Each dies with this process, whose socket it reads."""

    def __init__(self) -> None:
        self._idle: queue.LifoQueue[_Worker | None] = queue.LifoQueue()  # None: one may be started
        for _ in range(WORKERS):
            self._idle.put(None)

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer of `Renderer`. Raises TooMuchWork, Busy, and TypeError or ValueError for what is not JSON."""
        frame = json.dumps(request).encode()
        frame = LENGTH.pack(len(frame)) + frame
        for _ in range(2):  # one that was killed from outside while it was idle says so only now
            worker = self._take()
            kept: _Worker | None = None
            try:
                answer = worker.exchange(frame)
                if answer is not None:
                    kept = worker
                    return json.loads(answer)
                status = worker.end()
            except TimeoutError:
                worker.end()
                raise Busy from None
            finally:
                self._idle.put(kept)
            if status in (-signal.SIGPROF, TOO_MUCH_MEMORY):
                raise TooMuchWork
        raise Busy

    def _take(self) -> "_Worker":
        try:
            worker = self._idle.get(timeout=WAIT_SECONDS)
        except queue.Empty:
            raise Busy from None
        if worker is not None:
            return worker
        try:
            return _Worker()
        except OSError:  # the machine has no process or socket left
            self._idle.put(None)
            raise Busy from None


class _Worker:
    def __init__(self) -> None:
        self._connection, other = socket.socketpair()
        self._connection.settimeout(WAIT_SECONDS)
        environment = {name: value for name, value in os.environ.items() if name.startswith(_PASSED_ON)}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        command = [sys.executable, "-P", "-m", "sojourn.engine.token.text.template_worker"]  # -P: none of this folder
        with other:
            process = subprocess.Popen(command, stdin=other, stdout=subprocess.DEVNULL, env=environment)
        self._end = weakref.finalize(self, _ended, self._connection, process)

    def exchange(self, frame: bytes) -> bytes | None:
        """None where the process ended instead. Raises TimeoutError."""
        try:
            self._connection.sendall(frame)
            return received(self._connection)
        except ConnectionError:
            return None

    def end(self) -> int | None:
        """The exit status of the process."""
        return self._end()


def _ended(connection: socket.socket, process: subprocess.Popen) -> int:
    connection.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(0.5)  # one that ended itself has a status of its own
    process.kill()
    return process.wait()


@cache
def _of_process(pid: int) -> TemplateProcesses:
    return TemplateProcesses()


def template_processes() -> TemplateProcesses:
    """Those of this process: a fork starts its own, and does not write into its parent's sockets."""
    return _of_process(os.getpid())
