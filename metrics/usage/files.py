"""Usage files on disk: how they are named, and which of them a live server still writes."""

import fcntl
import os
from pathlib import Path

from sojourn.metrics.errors import RunDataError

FOLDER = "usage"  # of a run directory
PATTERN = "usage-*.jsonl"


def file_name(day: str, life: str, number: int) -> str:
    """`day` as 20261123; `number` counts the files of one life of a server."""
    return f"usage-{day}-{life}-{number:06d}.jsonl"


def life_of(file: Path) -> str:
    """The life of the server process that wrote a file."""
    parts = file.stem.split("-")
    return parts[2] if len(parts) == 4 else ""


def usage_folder(path: Path) -> Path:
    """The folder itself, or the one of a run directory. Raises RunDataError where there is no usage."""
    for folder in (path, path / FOLDER):
        if any(folder.glob(PATTERN)):
            return folder
    where = f"{path} holds no usage files" if path.is_dir() else f"{path} is not a folder"
    raise RunDataError(f"{where}; name the folder of `sojourn serve --usage-dir`, or a run directory that has one")


def usage_files(folder: Path) -> list[Path]:
    """Those of one life in the order of their writing."""
    return sorted(folder.glob(PATTERN), key=lambda file: (life_of(file), file.stem.rpartition("-")[2]))


def lock(descriptor: int) -> None:
    """Marks a file as being written, for as long as this process lives. Raises OSError where another one writes it."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def is_being_written(file: Path) -> bool:
    """Whether a process of this host writes it. Raises OSError where the file is gone."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
