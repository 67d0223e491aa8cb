"""The runs of the app's folder: their names, which one is opened first, and which of two is the one before."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.listing import ListedRun, list_runs, newest, run_beside

DOCUMENTS = ("run.json", "diagnosis.json", "client.parquet", "client.parts")  # that a list is read from
_read = lru_cache(maxsize=8)(lambda folder, stamps: list_runs(folder))


def listed(runs: Path) -> list[ListedRun]:
    """As `list_runs`, read again where a document of it changed; [] where the folder is none."""
    files = [file for name in DOCUMENTS for file in runs.glob(f"*/{name}")]
    stamps = tuple(sorted((str(file), stamp) for file in files if (stamp := _changed_ns(file)) is not None))
    try:
        return _read(runs, stamps)
    except RunDataError:
        return []


def _changed_ns(file: Path) -> int | None:
    try:
        return file.stat().st_mtime_ns
    except FileNotFoundError:  # a segment that was compacted in between
        return None


def run_names(runs: Path) -> list[str]:
    """Of the run directories right below a folder, newest first, each fleet with its servers (`RUN/server-0`) behind
    it."""
    names = []
    for run in listed(runs):
        servers = (file.parent.name for file in (runs / run.name).glob("server-*/run.json"))
        names += [run.name, *(f"{run.name}/{server}" for server in sorted(servers, key=_number_last))]
    return names


def _number_last(server: str) -> tuple[int, str]:
    return len(server), server


def note_of(runs: Path, name: str) -> str:
    """What a run is that is no load of its own, else ""."""
    return next((run.note for run in listed(runs) if run.name == name), "")


def first_name(runs: Path) -> str:
    """The run that the app opens by itself. The folder must hold one."""
    return newest(listed(runs)).name


def name_beside(runs: Path, name: str, others: Sequence[str]) -> str:
    """The run that is compared with this one unless the reader chooses another: of a server another one of its fleet,
    else as `run_beside`."""
    fleet = name.rpartition("/")[0]
    if siblings := [other for other in others if fleet and other.startswith(f"{fleet}/")]:
        return siblings[0]
    found = run_beside(listed(runs), name)
    return others[0] if found is None else found.name
