"""The disk tier: one file a block, written beside the loop, found again after a restart.

A file is a header and the bytes of the block. It is written under another name and then renamed, so that a process
that is killed leaves no half file under a block's name. Nothing is synced: what a power failure leaves is found out by
the checksum. The header names the format, the model, the key and the length, so that the file of another model is never
read. Files of a model stand in a folder of its fingerprint; one process at a time owns the folder.
"""

import contextlib
import errno
import fcntl
import logging
import os
import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import xxhash

from engine.memory.tiers.store import Moved
from metrics.errors import ModelError

log = logging.getLogger(__name__)

MAGIC, FORMAT = b"sojourn-kv", 1
HEADER = struct.Struct("<10sH16s16sQ16s")  # magic, format, fingerprint, key, bytes of the block, their xxh3-128
SUFFIX, PART = ".kv", ".part"
LOG_EVERY_S = 60.0
CLOSE_S = 5.0  # that an ending process gives to the read and the write under way


class DiskStore:
    """Files below `folder`, by a thread that reads and one that writes. `slot_bytes` gives the memory of a slot.

    Raises ModelError if the folder cannot be used.
    """

    name = "disk"

    def __init__(self, folder: Path, fingerprint: bytes, slot_bytes: Callable[[int], memoryview], block_bytes: int):
        self.folder = folder / fingerprint.hex()
        self.payload_bytes = block_bytes
        self.block_bytes = HEADER.size + block_bytes
        self._fingerprint = fingerprint
        self._slot_bytes = slot_bytes
        self._lock = _owned(self.folder)
        self._finished: deque[Moved] = deque()
        self._logged_s: dict[str, float] = {}
        self._is_closing = False
        self._reads, self._writes = _Worker("kv-disk-read"), _Worker("kv-disk-write")

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

    def read(self, key: bytes, slot: int) -> None:
        self._reads.submit(lambda: self._moved(key, True, self._read, slot))

    def write(self, key: bytes, slot: int) -> None:
        self._writes.submit(lambda: self._moved(key, False, self._write, slot))

    def remove(self, key: bytes) -> None:
        self._writes.submit(lambda: self._path(key).unlink(missing_ok=True))

    def finished(self) -> list[Moved]:
        moved = []
        while self._finished:
            moved.append(self._finished.popleft())
        return moved

    def wait(self) -> None:
        time.sleep(0.002)

    def close(self) -> None:
        self._is_closing = True
        self._reads.close(CLOSE_S)
        self._writes.close(CLOSE_S)
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
                return key if self._is_header_of(key, file.read(HEADER.size)) else None
        except (ValueError, OSError):
            return None

    def _is_header_of(self, key: bytes, header: bytes) -> bool:
        if len(header) != HEADER.size:
            return False
        magic, version, fingerprint, named, length, _ = HEADER.unpack(header)
        expected = (MAGIC, FORMAT, self._fingerprint, key, self.payload_bytes)
        return (magic, version, fingerprint, named, length) == expected

    def _moved(self, key: bytes, is_read: bool, work: Callable[[bytes, int], bool], slot: int) -> None:
        began_ns = time.monotonic_ns()
        try:
            ok = not self._is_closing and work(key, slot)
        except OSError as error:
            ok = False
            self._complain("read" if is_read else "written", error)
        self._finished.append(Moved(key, is_read, ok, self.block_bytes, began_ns, time.monotonic_ns()))

    def _read(self, key: bytes, slot: int) -> bool:
        memory, header = self._slot_bytes(slot), bytearray(HEADER.size)
        with open(self._path(key), "rb", buffering=0) as file:
            count = os.preadv(file.fileno(), [header, memory], 0)
            while 0 < count < self.block_bytes:
                more = os.preadv(file.fileno(), [memory[count - HEADER.size :]], count) if count >= HEADER.size else 0
                if not more:
                    break
                count += more
        whole = count == self.block_bytes and self._is_header_of(key, bytes(header))
        if whole and HEADER.unpack(header)[-1] == xxhash.xxh3_128_digest(memory):
            return True
        self._complain("used: its contents are damaged", None)
        return False

    def _write(self, key: bytes, slot: int) -> bool:
        memory, path = self._slot_bytes(slot), self._path(key)
        checksum = xxhash.xxh3_128_digest(memory)
        header = HEADER.pack(MAGIC, FORMAT, self._fingerprint, key, self.payload_bytes, checksum)
        part = path.with_suffix(PART)
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
        return True

    def _complain(self, what: str, error: OSError | None) -> None:
        """At most one sentence a minute and kind."""
        now_s = time.monotonic()
        if now_s - self._logged_s.get(what, -LOG_EVERY_S) < LOG_EVERY_S:
            return
        self._logged_s[what] = now_s
        reason = "" if error is None else f": {error.strerror}"
        is_full = error is not None and error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "; lower kv_disk_gib or make room" if is_full else ""
        log.warning(
            "a KV block in %s could not be %s%s; the tokens are computed instead%s", self.folder, what, reason, remedy
        )


class _Worker:
    """One thread that runs tasks in their order."""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], object]) -> None:
        self._tasks.put(task)

    def close(self, timeout_s: float) -> None:
        self._tasks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except OSError as error:  # of a removal: the file stays, and takes room beyond the bound
                log.warning("a KV block could not be removed: %s", error.strerror)


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
