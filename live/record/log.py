"""Follows what a server says into a file of the run, byte for byte. A line that cannot be written is counted."""

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

POLL_S = 0.25
AT_ONCE = 1 << 16
LARGEST = 1 << 30  # bytes that are kept: a log in a loop must not fill the disk


class LogFollower:
    """Owns the thread that copies. `on_bytes` sees everything, too, such as to show it."""

    def __init__(self, into: Path, on_bytes: Callable[[bytes], None] = lambda _: None):
        self._into, self._on_bytes = into, on_bytes
        self.lost_bytes = 0
        self._kept = 0
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen | None = None

    def follow(self, source: BinaryIO | Path | tuple[str, ...]) -> None:
        """An output of a child; a file, from its end on; or a command that prints a log, which is ended with this."""
        if isinstance(source, tuple):
            self._process = subprocess.Popen(source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            source = self._process.stdout  # type: ignore[assignment]
        begin = source.stat().st_size if isinstance(source, Path) and source.exists() else 0
        self._thread = threading.Thread(target=self._copy, args=(source, begin), name="log", daemon=True)
        self._thread.start()

    def stop(self, wait_s: float = 2.0) -> None:
        """What a child has said is read to its end, for as long as `wait_s`."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _copy(self, source: BinaryIO | Path, begin: int) -> None:
        with self._into.open("ab", buffering=0) as target:
            if isinstance(source, Path):
                self._tail(source, begin, target)
                return
            while content := os.read(source.fileno(), AT_ONCE):
                self._keep(content, target)

    def _tail(self, path: Path, at: int, target: BinaryIO) -> None:
        """From byte `at` on."""
        while True:
            is_last = self._stopping.is_set()
            try:
                size = path.stat().st_size
                at = 0 if size < at else at  # it was rotated
                with path.open("rb") as file:
                    file.seek(at)
                    while content := file.read(AT_ONCE):
                        at += len(content)
                        self._keep(content, target)
            except OSError:
                pass
            if is_last:
                return
            self._stopping.wait(POLL_S)

    def _keep(self, content: bytes, target: BinaryIO) -> None:
        try:
            self._on_bytes(content)
        except (OSError, ValueError):  # nobody reads it any more: the server must not stand for that
            self._on_bytes = lambda _: None
        try:
            if self._kept + len(content) > LARGEST:
                raise OSError
            target.write(content)
            self._kept += len(content)
        except OSError:
            self.lost_bytes += len(content)
