"""The disk tier: one file a block, written beside the loop, found again after a restart.

A file is a header and the bytes of the block. It is written under another name and then renamed, so that a process
that is killed leaves no half file under a block's name. Nothing is synced: what a power failure leaves is found out by
the checksum. The header names the format, the model, the key and the length, so that the file of another model is never
read. Files of a model stand in a folder of its fingerprint; one process at a time owns the folder.
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from sojourn.engine.techniques.tiers.block_format import HEADER, BlockFormat
from sojourn.engine.techniques.tiers.worker import Complaints
from sojourn.metrics.errors import ModelError

SUFFIX, PART = ".kv", ".part"
OUTCOMES = {  # of an operation that failed: what could not be done, and what follows
    "read": ("read", "the tokens are computed instead"),
    "write": ("written", "its tokens are computed again once the device has given them up"),
    "remove": ("removed", "it takes room beyond kv_disk_gib"),
}


class Disk:
    """Files below `folder`. `slot_bytes` gives the memory of a slot. Raises ModelError if the folder cannot be used."""

    name = "disk"

    def __init__(self, folder: Path, form: BlockFormat, slot_bytes: Callable[[int], memoryview]):
        self.folder = folder / form.fingerprint.hex()
        self.block_bytes = form.block_bytes
        self._format = form
        self._slot_bytes = slot_bytes
        self._lock = _owned(self.folder)
        self._complaints = Complaints()

    def known(self) -> list[bytes]:
        """The keys of the files that look whole, oldest first. Parts of a killed process are deleted."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if entry.name.endswith(PART):
                    os.unlink(entry.path)
                elif entry.name.endswith(SUFFIX) and (key := self._key_of(entry)) is not None:
                    found.append((entry.stat().st_mtime_ns, key))
        return [key for _, key in sorted(found)]

    def read(self, key: bytes, slot: int) -> bool:
        memory, header = self._slot_bytes(slot), bytearray(HEADER.size)
        with open(self._path(key), "rb", buffering=0) as file:
            count = os.preadv(file.fileno(), [header, memory], 0)
            while 0 < count < self.block_bytes:
                more = os.preadv(file.fileno(), [memory[count - HEADER.size :]], count) if count >= HEADER.size else 0
                if not more:
                    break
                count += more
        if count == self.block_bytes and self._format.is_whole(key, bytes(header), memory):
            return True
        self._complaints.log("damaged", "a KV block in %s is damaged; the tokens are computed instead", self.folder)
        return False

    def write(self, key: bytes, slot: int) -> None:
        memory, path = self._slot_bytes(slot), self._path(key)
        header, part = self._format.header(key, memory), path.with_suffix(PART)
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
                count = os.writev(file.fileno(), [header, memory])
                while count < self.block_bytes:  # a disk that fills up writes a part, and then says so
                    count += os.write(file.fileno(), memory[count - HEADER.size :])
            os.rename(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def remove(self, key: bytes) -> None:
        self._path(key).unlink(missing_ok=True)

    def failed(self, operation: str, error: Exception) -> None:
        done, follows = OUTCOMES[operation]
        is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        self._complaints.log(
            operation, "a KV block in %s could not be %s: %s; %s%s", self.folder, done,
            getattr(error, "strerror", None) or error, follows, "; lower kv_disk_gib or make room" if is_full else "",
        )  # fmt: skip

    def close(self) -> None:
        """Another process may own the folder."""
        os.close(self._lock)

    def _path(self, key: bytes) -> Path:
        return self.folder / f"{key.hex()}{SUFFIX}"

    def _key_of(self, entry: os.DirEntry) -> bytes | None:
        """None for a file that was not written here, or is not whole."""
        try:
            key = bytes.fromhex(entry.name.removesuffix(SUFFIX))
            if len(key) != 16 or entry.stat().st_size != self.block_bytes:
                return None
            with open(entry.path, "rb") as file:
                return key if self._format.is_of(key, file.read(HEADER.size)) else None
        except (ValueError, OSError):
            return None


def _owned(folder: Path) -> int:
    """The descriptor of a lock that the process holds while it owns the folder."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ModelError(f"kv_disk_path: {folder} cannot be written: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ModelError(
            f"kv_disk_path: {folder} is in use by another server of this model; give each its own folder"
        ) from None
    return lock
