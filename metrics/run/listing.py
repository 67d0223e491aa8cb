"""The runs of a folder, with what their documents say of them. Reads no table but for its number of rows."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section

if TYPE_CHECKING:
    import pandas as pd


class ListedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run of a folder. `state`, `headline`, `goodput_rps` and `attainment` are those of its diagnosis.json; null
    where it has none, or only one from before its last requests."""

    name: str
    recorded_at: str | None  # ISO 8601, UTC
    scenario: str | None
    model: str | None
    requests: int | None
    valid: bool | None
    state: str | None  # healthy, degraded, overloaded, inconclusive, invalid
    headline: str | None
    goodput_rps: float | None = None  # of all classes
    attainment: float | None = None
    source: str | None = None  # the tool that measured it, where it was imported
    unreadable: str = ""  # why it cannot be read


class _Goodput(msgspec.Struct):
    goodput_rps: float | None = None
    attainment: float | None = None


class _Verdict(msgspec.Struct):
    state: str | None = None
    headline: str | None = None
    goodput: list[_Goodput] = []


def list_runs(folder: Path) -> list[ListedRun]:
    """The run directories right below a folder, newest first. Raises RunDataError where the folder is none."""
    if not folder.is_dir():
        raise RunDataError(f"{folder} is not a folder; give the folder that holds run directories, such as runs")
    found = [(_recorded_ns(path.parent), path.parent) for path in folder.glob("*/run.json")]
    return [_listed(path, at_ns) for at_ns, path in sorted(found, key=lambda each: (-each[0], each[1].name))]


def frame_of(runs: Sequence[ListedRun]) -> "pd.DataFrame":
    """The same as a table, one row a run."""
    import pandas as pd

    return pd.DataFrame([msgspec.structs.asdict(run) for run in runs], columns=list(ListedRun.__struct_fields__))


def _recorded_ns(path: Path) -> int:
    """When it was recorded, by its wall clock; when its run.json was written, where it has none."""
    try:
        return int(section(RunDirectory(path).meta(), "wall_anchor")["unix_ns"])
    except (RunDataError, KeyError, TypeError, ValueError):
        return (path / "run.json").stat().st_mtime_ns


def _listed(path: Path, at_ns: int) -> ListedRun:
    run = RunDirectory(path)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_ns / 1e9))
    try:
        meta = run.meta()
    except RunDataError as error:
        nothing = dict.fromkeys(("scenario", "model", "requests", "valid", "state", "headline"))
        return ListedRun(name=path.name, recorded_at=at, unreadable=str(error), **nothing)
    scenario = meta.get("scenario")
    name = scenario if isinstance(scenario, str) else section(meta, "scenario").get("name")
    verdict = _verdict(run)
    whole = verdict.goodput[0] if verdict.goodput else _Goodput()
    return ListedRun(
        name=path.name, recorded_at=at, scenario=name,
        model=_word(engine_settings(meta).get("model")), requests=_rows(run), valid=meta.get("valid"),
        state=verdict.state, headline=verdict.headline, goodput_rps=whole.goodput_rps, attainment=whole.attainment,
        source=_word(section(meta, "imported").get("tool")),
    )  # fmt: skip


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _rows(run: RunDirectory) -> int | None:
    """Requests of the client, else of the server; None while segments are being written."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for table in ("client", "requests"):
        file = run.path / f"{table}.parquet"
        if file.exists():
            try:
                return pq.ParquetFile(file).metadata.num_rows
            except (pa.ArrowException, OSError):
                return None
    return None


def _verdict(run: RunDirectory) -> _Verdict:
    try:
        file = run.current_diagnosis()
        return _Verdict() if file is None else msgspec.json.decode(file.read_bytes(), type=_Verdict)
    except (OSError, msgspec.MsgspecError):
        return _Verdict()
