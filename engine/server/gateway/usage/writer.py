"""One usage file after the other, of this process alone: lines are appended whole, and survive a kill at any moment."""

import logging
import os
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.outage import WriteOutage
from sojourn.metrics.usage.files import file_name, lock, unlock
from sojourn.metrics.usage.record import FileHead, Line, encode
from sojourn.metrics.version import own_version

log = logging.getLogger(__name__)
MOST_WAITING = 65_536  # lines that wait in memory for a disk that is full; more are lost


class UsageWriter:
    """Owns the open file. Another one begins on another day (UTC), above `file_bytes`, and where it was removed.

    A line that the disk refuses waits in memory and is written again; `failed` counts such lines, `lost` those that
    were given up. Raises RunDataError if the folder cannot be written.
    """

    def __init__(
        self, folder: Path, file_bytes: int, sync_each_line: bool, clock: Callable[[], float] = time.time
    ):  # fmt: skip
        self.folder = folder
        self.life = secrets.token_hex(6)
        self.failed = 0
        self.lost = 0
        self._file_bytes, self._sync_each_line, self._clock = file_bytes, sync_each_line, clock
        self._outage = WriteOutage(log, f"usage is written to {folder}")
        self._waiting: deque[bytes] = deque()
        self._number = 0
        self._file = -1
        self._retired: list[int] = []  # files that are complete, but not synced
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._begin_file()
        except OSError as error:
            reason = error.strerror or error
            raise RunDataError(f"usage cannot be written to {folder}: {reason}; choose another --usage-dir") from None

    def write(self, line: Line) -> None:
        """Appends a line, after those that wait. Once it returns, the line survives a kill of this process."""
        if len(self._waiting) >= MOST_WAITING:
            self._waiting.popleft()
            self.lost += 1
        self._waiting.append(encode(line) + b"\n")
        self._write_waiting(is_new=True)

    def check(self) -> bool:
        """Writes what waits, and looks whether the file is still there. True where another one was begun instead."""
        if self._file >= 0 and self._is_gone():
            self.failed += 1
            self._outage.begin(f"the usage file {self._path} was removed, with the records of finished calls")
            self._retire()
        began = self._file < 0
        if self._waiting or began:
            self._write_waiting(is_new=False)
        else:
            self._outage.end()
        return began and self._file >= 0

    def sync(self) -> None:
        """Makes what was appended survive a power failure. Blocks; may run in another thread."""
        retired, self._retired = self._retired, []
        with suppress(OSError):  # retired meanwhile, or a disk that refuses: the next write says so
            current = os.dup(self._file)
            try:
                os.fsync(current)
            finally:
                os.close(current)
        for descriptor in retired:
            with suppress(OSError):
                os.fsync(descriptor)
            os.close(descriptor)

    def close(self) -> str | None:
        """Writes and syncs the rest. A sentence of what is lost, None if nothing is."""
        if self._waiting:
            self._write_waiting(is_new=False)
        self._retire()
        self.sync()
        self.lost += len(self._waiting)
        self._waiting.clear()
        return f"{self.lost:,} lines of usage could not be written to {self.folder}" if self.lost else None

    def _write_waiting(self, *, is_new: bool) -> None:
        try:
            self._ready_file()
            while self._waiting:
                self._append(self._waiting[0])
                self._waiting.popleft()
            self._outage.end()
        except OSError as error:
            self.failed += is_new
            self._outage.begin(
                f"usage cannot be written to {self.folder}: {error.strerror or error}; the server goes on, and its "
                f"lines wait in memory"
            )

    def _append(self, content: bytes) -> None:
        """Raises OSError. Behind a torn line, which readers skip, the next one begins on a line of its own."""
        content = b"\n" + content if self._is_torn else content
        written = os.write(self._file, content)
        self._size += written
        self._is_torn = written != len(content)
        if self._is_torn:
            raise OSError(f"the disk took {written} of {len(content)} bytes")
        if self._sync_each_line:
            os.fsync(self._file)

    def _ready_file(self) -> None:
        if self._file < 0 or self._day() != self._begun_on or self._size >= self._file_bytes:
            self._begin_file()

    def _begin_file(self) -> None:
        """The next file is locked before the last one is given up: a reader always sees that this process lives."""
        self._number += 1
        day = self._day()
        path = self.folder / file_name(day, self.life, self._number)
        self.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            lock(descriptor)
            head = FileHead(self.life, os.getpid(), socket.gethostname(), own_version())
            content = encode(head) + b"\n"
            if os.write(descriptor, content) != len(content):
                raise OSError("the disk took only a part of the first line")
        except OSError:
            os.close(descriptor)
            with suppress(OSError):
                path.unlink()  # on a full disk there would be one more each second
            raise
        self._retire()
        self._file, self._path, self._begun_on, self._size = descriptor, path, day, len(content)
        self._is_torn = False

    def _retire(self) -> None:
        if self._file >= 0:
            unlock(self._file)
            self._retired.append(self._file)
            self._file = -1

    def _is_gone(self) -> bool:
        try:
            return not os.path.samestat(os.fstat(self._file), self._path.stat())
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def _day(self) -> str:
        return time.strftime("%Y%m%d", time.gmtime(self._clock()))
