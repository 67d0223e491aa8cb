"""What was measured once and is kept for this machine: where it lies, written all or nothing."""

import hashlib
import os
from pathlib import Path

import msgspec


def kept_path(kind: str, machine: str) -> Path:
    """The file of one kind of measurement of one machine: $XDG_CACHE_HOME or ~/.cache, below sojourn/."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "sojourn" / f"{kind}-{hashlib.sha256(machine.encode()).hexdigest()[:12]}.json"


def keep(document: msgspec.Struct, path: Path) -> Path:
    """Writes a document that a person can read too, and gives its path back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2))
    os.replace(partial, path)
    return path
