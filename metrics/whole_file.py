"""Files that no reader meets half written."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Writes a file, or replaces it, all or nothing. Several processes may write the same one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    os.replace(partial, path)
    return path
