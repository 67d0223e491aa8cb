"""The store of measurements of this machine: one file for each kind, written all or nothing."""

import hashlib
import os
from pathlib import Path

import msgspec

from metrics.whole_file import write_whole


def store_path(kind: str, machine: str) -> Path:
    """The file of one kind of measurement: below sojourn/ in $XDG_CACHE_HOME or ~/.cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "sojourn" / f"{kind}-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.json"


def store(document: msgspec.Struct, path: Path) -> Path:
    """Writes a document as indented JSON; returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_whole(path, msgspec.json.format(msgspec.json.encode(document), indent=2))
