"""Files that no reader meets half written."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Writes a file, or replaces it, all or nothing. Several processes may write the same one. Raises OSError."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)  # a full disk needs the room
        raise
    return path
