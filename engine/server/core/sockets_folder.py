"""The private folder of a front's sockets, and the removal of folders whose front was killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "sojourn-"
LOCK = "front.lock"


class SocketsFolder:
    """A folder with mode 0700. The front locks a file in it, and the system ends the lock with the process.

    A process id would not do: another container that shares the folder for temporary files has ids of its own.
    """

    def __init__(self) -> None:
        remove_abandoned_folders()
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        unfinished = self.path / f"{LOCK}.new"
        self._lock = unfinished.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        unfinished.rename(self.path / LOCK)  # from now on the file is locked for as long as this process lives

    def new_generation(self) -> Path:
        """A folder for the sockets of one core: no message of its predecessor can reach it."""
        return Path(tempfile.mkdtemp(dir=self.path))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_abandoned_folders() -> None:
    """Removes this user's folders whose front is dead. A folder without a lock may be one that is being made."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            with (folder / LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while its front lives
                shutil.rmtree(folder, ignore_errors=True)
