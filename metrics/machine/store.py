"""The store of measurements of this machine: one file for each kind, written all or nothing."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from sojourn.metrics.whole_file import write_whole


def store_path(kind: str, machine: str) -> Path:
    """The file of one kind of measurement: below sojourn/ in $XDG_CACHE_HOME or ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "sojourn" / f"{kind}-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.json"


def store(document: msgspec.Struct, path: Path) -> Path:
    """Writes a document as indented JSON; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, msgspec.json.format(msgspec.json.encode(document), indent=2))


@contextmanager
def changing(path: Path) -> Iterator[None]:
    """For a document that is read, changed and stored again: another process that changes it waits. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
