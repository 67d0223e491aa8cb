"""Diagnoses recorded runs at every evidence level and judges the verdicts. A verdict that is known is not made again.

Pure apart from its cache, a file in the scored folder: the verdicts by run, level, the run's files and the program's.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import msgspec

from sojourn.diagnosis.confidence import FEATURES, confidence
from sojourn.diagnosis.score.judgement import Judgement, judge
from sojourn.diagnosis.score.said import Said, said_of
from sojourn.diagnosis.score.threshold_rules import BASELINE, threshold_verdict
from sojourn.diagnosis.score.truth import FAULT_FILE, FaultRecord, read_fault
from sojourn.diagnosis.verdict import Diagnosis
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.interrupts import own_interrupts
from sojourn.metrics.request.goodput import judged, measured
from sojourn.metrics.run.directory import RunDirectory, engine_settings
from sojourn.metrics.whole_file import write_whole

Diagnose = Callable[[RunDirectory, str], Diagnosis]  # of a run, at an evidence level
SCORED = ("client", "metrics", "requests", "steps", "kernels")
NEEDED: dict[str, str] = {
    "metrics": "scrapes",
    "requests": "requests",
    "steps": "steps",
    "kernels": "kernels",
    BASELINE: "scrapes",
}  # level → the table that it adds: without it the level says no more
CACHE_FILE = "verdicts.json"
CODE = ("metrics", "interop", "engine", "replay", "diagnosis")  # the folders whose code a verdict depends on


class Verdicts(msgspec.Struct, frozen=True, kw_only=True):
    """What was said of one run, by level."""

    files: str  # fingerprint of the run's files and of the program
    attainment: float  # by the client's records
    said: dict[str, Said]


def score(
    folder: Path, diagnose: Diagnose, *, levels: Sequence[str] = (*SCORED, BASELINE), processes: int = 2,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, list[Judgement]]:  # fmt: skip
    """Level → judgements of all runs below `folder` that have a `fault.json`.

    `diagnose` is a function at the top of a module, since other processes call it. A level leaves out the runs that
    lack its table. `progress` is called with the number of finished runs and their total. Raises RunDataError.
    """
    runs = {str(path.relative_to(folder)): read_fault(path) for path in recorded_runs(folder)}
    if not runs:
        raise RunDataError(f"{folder} holds no run with a {FAULT_FILE}; make some first: sojourn dev faults run")
    code = code_fingerprint()
    known = _read_cache(folder)
    verdicts: dict[str, Verdicts] = {}
    work = partial(_verdicts, folder, diagnose, tuple(levels), code)
    tasks = {name: known.get(name) for name in runs}
    try:
        for done, (name, found) in enumerate(_each(work, tasks, processes), 1):
            verdicts[name] = found
            progress(done, len(runs))
    finally:  # also what was said until Ctrl-C
        write_whole(folder / CACHE_FILE, msgspec.json.encode(known | verdicts))
    return _judgements(folder, runs, verdicts, levels)


def recorded_runs(folder: Path) -> list[Path]:
    """The run directories below a folder, and the folder itself, that hold a record of a fault."""
    return sorted(file.parent for file in folder.rglob(FAULT_FILE) if (file.parent / "run.json").exists())


def code_fingerprint() -> str:
    """Of the program's sources that make a verdict: another one makes every verdict anew."""
    root = Path(__file__).resolve().parents[2]
    digest = hashlib.sha256()
    for name in CODE:
        for file in sorted((root / name).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _each(
    work: Callable[[str, Verdicts | None], Verdicts], tasks: dict[str, Verdicts | None], processes: int
) -> Iterator[tuple[str, Verdicts]]:
    if processes == 1:
        yield from ((name, work(name, old)) for name, old in tasks.items())
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        with own_interrupts():
            results = pool.map(work, tasks, tasks.values())
        yield from zip(tasks, results, strict=True)


def _verdicts(
    folder: Path, diagnose: Diagnose, levels: tuple[str, ...], code: str, name: str, old: Verdicts | None
) -> Verdicts:
    run = RunDirectory(folder / name)
    files = f"{code} {_stamp(run)}"
    if old is None or old.files != files:
        old = Verdicts(files=files, attainment=attainment(run), said={})
    missing = [level for level in levels if level not in old.said and _has_evidence(run, level)]
    return msgspec.structs.replace(old, said=old.said | {level: _say(run, diagnose, level) for level in missing})


def _stamp(run: RunDirectory) -> str:
    files = sorted(path for path in run.path.iterdir() if path.suffix == ".parquet" or path.name == "run.json")
    return hashlib.sha256(repr([(path.name, path.stat().st_mtime_ns) for path in files]).encode()).hexdigest()[:16]


def _has_evidence(run: RunDirectory, level: str) -> bool:
    return level not in NEEDED or bool(run.sources(NEEDED[level]))


def _say(run: RunDirectory, diagnose: Diagnose, level: str) -> Said:
    """An error is a verdict too: a wrong one."""
    began = time.perf_counter()
    try:
        if level == BASELINE:
            return threshold_verdict(run)
        document = msgspec.to_builtins(diagnose(run, level))
    except Exception as error:
        return Said(state="failed", headline=f"{type(error).__name__}: {error}", seconds=time.perf_counter() - began)
    return said_of(document, time.perf_counter() - began)


def attainment(run: RunDirectory) -> float:
    """The share of good requests by the client's records alone."""
    meta = run.meta()
    rows = judged(measured(run.requests(), meta), meta.get("objectives") or [])
    return float(rows.good.mean()) if len(rows) else 0.0


def _judgements(
    folder: Path, runs: dict[str, FaultRecord], verdicts: dict[str, Verdicts], levels: Iterable[str]
) -> dict[str, list[Judgement]]:
    controls = [(record, verdicts[name].attainment) for name, record in runs.items() if record.control is not None]
    settings = {name: engine_settings(RunDirectory(folder / name).meta()) for name in runs}
    return {
        level: [
            judge(name, record, level, with_confidence(verdicts[name].said[level]), verdicts[name].attainment,
                  base_attainment(record, controls), settings[name])
            for name, record in runs.items()
            if level in verdicts[name].said
        ]
        for level in levels
    }  # fmt: skip


def with_confidence(said: Said) -> Said:
    """With the confidence of today's coefficients, so that a new calibration makes no verdict anew."""
    known = [set(FEATURES) <= set(cause.features) for cause in said.causes]
    causes = [
        msgspec.structs.replace(cause, confidence=confidence(cause.features)) if is_known else cause
        for cause, is_known in zip(said.causes, known, strict=True)
    ]
    return msgspec.structs.replace(said, causes=causes)


def base_attainment(record: FaultRecord, controls: Sequence[tuple[FaultRecord, float]]) -> float | None:
    """Of the base's run with the same arrivals, which is that of the same repeat, else the mean of all its runs."""
    of_base = {control.repeat: value for control, value in controls if control.case == record.base}
    return of_base.get(record.repeat, mean(of_base.values()) if of_base else None)


def _read_cache(folder: Path) -> dict[str, Verdicts]:
    """{} where there is none. Verdicts that cannot be read, such as those of another version, are left out."""
    try:
        stored = msgspec.json.decode((folder / CACHE_FILE).read_bytes(), type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError):
        return {}
    found = {}
    for name, each in stored.items():
        with suppress(msgspec.DecodeError):
            found[name] = msgspec.json.decode(each, type=Verdicts)
    return found
