"""The runs of a folder, with what their documents say of them. Reads no table but for its head.

Two rules stand here once. A page or verb that opens one run by itself opens the `newest`. Of two runs the one that was
recorded first is A, "before", and the other B, "after".
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.records import CLIENT_STATUSES
from sojourn.metrics.run.directory import RunDirectory, engine_settings, section

if TYPE_CHECKING:
    import pandas as pd

ALONE, ALONE_SCENARIO = "-alone", "first-alone"  # of the requests that a small load sends one at a time before its own
NO_ANSWER = "no request of it has ended: it was stopped before that, or it still runs"
NEVER_ENDED = CLIENT_STATUSES[-1]


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
    note: str = ""  # what it is, where it is no load of its own or recorded nothing
    is_passed_over: bool = False  # no page or verb opens it by itself: it is empty, unreadable, or a part of another

    @property
    def verdict(self) -> str:
        """The state, and whether the run is not valid; "" where no diagnosis gives one."""
        is_doubtful = self.state and self.valid is False and self.state != "invalid"
        return f"{self.state}, not valid" if is_doubtful else self.state or ""


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


def newest(runs: Sequence[ListedRun]) -> ListedRun:
    """Of `list_runs`, which must not be empty: the first that a page or verb opens by itself."""
    return min(runs, key=lambda run: run.is_passed_over)


def run_beside(runs: Sequence[ListedRun], name: str) -> ListedRun | None:
    """The run that one is compared with unless another is chosen: the last one before it, of the same scenario where
    there is one; else the next one after it."""
    place = next((place for place, run in enumerate(runs) if run.name == name), len(runs))
    others = [*runs[place + 1 :], *reversed(runs[:place])]
    scenario = runs[place].scenario if place < len(runs) else None
    return min(others, key=lambda run: (run.is_passed_over, run.scenario != scenario), default=None)


def before_and_after(one: Path, other: Path) -> tuple[Path, Path]:
    """Two runs in the order in which they were recorded; as given where that is not known."""
    return (other, one) if _recorded_ns(other) < _recorded_ns(one) else (one, other)


def has_rows(run: RunDirectory, table: str) -> bool:
    """From the heads of its files: cheap enough for each draw of a page."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return any(file.suffix != ".parquet" or pq.read_metadata(file).num_rows for file in run.sources(table))
    except (OSError, pa.ArrowException):  # who reads it says what is wrong with it
        return True


def frame_of(runs: Sequence[ListedRun]) -> "pd.DataFrame":
    """The same as a table, one row a run."""
    import pandas as pd

    return pd.DataFrame([msgspec.structs.asdict(run) for run in runs], columns=list(ListedRun.__struct_fields__))


def _recorded_ns(path: Path) -> int:
    """When it was recorded, by its wall clock; when its run.json was written, where it has none."""
    try:
        at_ns = int(section(RunDirectory(path).meta(), "wall_anchor")["unix_ns"])
    except (RunDataError, KeyError, TypeError, ValueError):
        at_ns = 0
    return at_ns or (path / "run.json").stat().st_mtime_ns  # 0: the result of another tool, which names no date


def _listed(path: Path, at_ns: int) -> ListedRun:
    run = RunDirectory(path)
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_ns / 1e9))
    try:
        meta = run.meta()
    except RunDataError as error:
        nothing: dict[str, Any] = dict.fromkeys(("scenario", "model", "requests", "valid", "state", "headline"))
        return ListedRun(name=path.name, recorded_at=at, unreadable=str(error), is_passed_over=True, **nothing)
    scenario = meta.get("scenario")
    name = scenario if isinstance(scenario, str) else section(meta, "scenario").get("name")
    verdict = _verdict(run)
    whole = verdict.goodput[0] if verdict.goodput else _Goodput()
    note, is_passed_over = _note(run, name)
    return ListedRun(
        name=path.name, recorded_at=at, scenario=name,
        model=_word(engine_settings(meta).get("model")), requests=_rows(run), valid=meta.get("valid"),
        state=verdict.state, headline=verdict.headline, goodput_rps=whole.goodput_rps, attainment=whole.attainment,
        source=_word(section(meta, "imported").get("tool")), note=note, is_passed_over=is_passed_over,
    )  # fmt: skip


def _note(run: RunDirectory, scenario: str | None) -> tuple[str, bool]:
    """What a run is that is no load of its own, and whether it is passed over."""
    if scenario == ALONE_SCENARIO and run.name.endswith(ALONE):
        load = run.path.with_name(run.name.removesuffix(ALONE))
        is_part = (load / "run.json").exists()
        followed = f"the rate of {load.name} comes from them" if is_part else "no load followed"
        return f"a few requests one at a time, to learn the server's speed; {followed}", is_part
    return (NO_ANSWER, True) if _is_empty(run) else ("", False)


def _is_empty(run: RunDirectory) -> bool:
    """Whether it has no record of a server, and no request with an end."""
    if any(has_rows(run, table) for table in ("requests", "steps")):
        return False
    if has_rows(run, "client"):
        return all(_never_ended(file) for file in run.sources("client"))
    return run.meta().get("workload") is not None or not has_rows(run, "scrapes")


def _never_ended(file: Path) -> bool:
    """Whether a table of the client has this one status, from its head."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        head = pq.read_metadata(file)
    except (OSError, pa.ArrowException):  # a segment, or damaged: what reads it says so
        return False
    names = head.schema.names
    groups = range(head.num_row_groups if "status" in names else 0)
    found = [head.row_group(group).column(names.index("status")).statistics for group in groups]
    return bool(found) and all(each is not None and each.min == each.max == NEVER_ENDED for each in found)


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
