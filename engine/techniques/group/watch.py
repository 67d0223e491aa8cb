"""Notices that a rank of a group has ended or stands still, while rank 0 may wait for it in a collective."""

import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from sojourn.engine.techniques.group import messages

LOOK_MS = 100
LOOKS = 3  # until the end of a process must have been seen


class Watch:
    """A thread that owns the socket of the ranks' beats. Calls `on_loss` once, with a sentence."""

    def __init__(
        self,
        beats: zmq.Socket,
        processes: Sequence[subprocess.Popen],
        hung_seconds: float,
        on_loss: Callable[[str], None],
    ):
        self.loss: str | None = None
        self._beats, self._processes, self._on_loss = beats, processes, on_loss
        self._hung_seconds = hung_seconds
        self._ends = False
        self._found_loss = threading.Event()
        self._thread = threading.Thread(target=self._run, name="group watch", daemon=True)
        self._thread.start()

    def wait_for_loss(self) -> str | None:
        """The loss, if there is one: another thread may have noticed it a moment before this one."""
        self._found_loss.wait(LOOKS * LOOK_MS / 1e3)
        return self.loss

    def stop(self) -> None:
        self._ends = True
        self._thread.join()

    def _run(self) -> None:
        heard = {rank: time.monotonic() for rank in range(1, 1 + len(self._processes))}
        while not self._ends and self.loss is None:
            if self._beats.poll(LOOK_MS):
                try:
                    heard[messages.decode_from_rank(self._beats.recv()).rank] = time.monotonic()
                except messages.UNREADABLE:
                    continue
            self.loss = self._look(heard)
        self._beats.close(linger=0)
        if self.loss is not None and not self._ends:
            self._on_loss(self.loss)
            self._found_loss.set()

    def _look(self, heard: dict[int, float]) -> str | None:
        for rank, process in enumerate(self._processes, 1):
            if process.poll() is not None:
                return f"rank {rank} of the parallel group {ending(process)}, and the group ends with it"
            silence = time.monotonic() - heard[rank]
            if silence > self._hung_seconds:
                return f"rank {rank} of the parallel group gave no sign of life for {silence:.0f} s; the group ends"
        return None


def ending(process: subprocess.Popen) -> str:
    """How a process that is no more has ended."""
    code = process.returncode
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
