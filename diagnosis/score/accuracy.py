"""The score of a folder of recorded runs as one document: what `--json` prints and the page shows."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sojourn.diagnosis.score.calibration import Fit, fit_confidence, samples_of
from sojourn.diagnosis.score.figures import LevelFigures, figures
from sojourn.diagnosis.score.judgement import Judgement
from sojourn.diagnosis.score.techniques import TechniqueCase, technique_cases
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.directory import RunDirectory, section
from sojourn.replay.verdict.ledger import FILE_NAME, LedgerEntry, read

MAIN = "steps"  # the level of the promise: what our own server records of every run


class Miss(msgspec.Struct, frozen=True, kw_only=True):
    """Runs of one case and severity with one wrong answer."""

    case: str
    severity: int
    workload: str
    wanted: str  # keys of the truth, or the state of a control
    said: str  # first key, or the state where no cause was named
    stood: str  # where the truth stood: "2nd", or "not named"
    runs: list[str]
    headline: str
    reasons: list[str]  # evidence of the first finding, "+" or "-" before each


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where and when the runs were recorded."""

    cpu: str
    cores: int | None
    gpus: list[str]
    first_day: str
    last_day: str


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows."""

    command: str
    scored_on: str
    machines: list[Machine]
    levels: list[LevelFigures]  # in the order of the levels, the baseline last
    misses: dict[str, list[Miss]]  # by level
    left_out: list[str]  # faults that did not hurt and disturbed controls: case/severity, with the number of runs
    fit: Fit | None  # of the confidence; None for too few verdicts
    techniques: list[TechniqueCase] = []
    predictions: list[LedgerEntry] = []  # verified fixes of these runs


def accuracy_of(folder: Path, judgements: Mapping[str, Sequence[Judgement]], command: str) -> Accuracy:
    """From the judgements of each level, as `scoring.score` gives them."""
    main = judgements.get(MAIN) or next(iter(judgements.values()))
    try:
        fit = fit_confidence(samples_of([each for level in judgements.values() for each in level]))
    except RunDataError:
        fit = None
    return Accuracy(
        command=command,
        scored_on=time.strftime("%Y-%m-%d"),
        machines=_machines(folder, [each.run for each in main]),
        levels=[figures(level, found) for level, found in judgements.items() if found],
        misses={level: misses(found) for level, found in judgements.items()},
        left_out=_left_out(main),
        fit=fit,
        techniques=technique_cases(main, {each.run: _chosen(folder / each.run) for each in main}),
        predictions=[entry for file in sorted(folder.rglob(FILE_NAME)) for entry in read(file)],
    )


def _chosen(path: Path) -> dict[str, Any]:
    return section(RunDirectory(path).meta(), "engine")


def misses(judgements: Sequence[Judgement]) -> list[Miss]:
    """The runs that count and whose cause was not first, and the false alarms; runs with one answer stand together."""
    found: dict[tuple[str, int, str], list[Judgement]] = {}
    for each in judgements:
        if each.counts and (each.false_alarm or each.first is False):
            found.setdefault((each.record.case, each.record.severity, _tell(each)), []).append(each)
    return [_miss(said, same) for (_, _, said), same in sorted(found.items())]


def _tell(each: Judgement) -> str:
    return each.said.causes[0].key if each.said.causes else each.said.state


def _miss(said: str, same: Sequence[Judgement]) -> Miss:
    one, record = same[0], same[0].record
    wanted = " + ".join("/".join(truth.keys) for truth in record.truths) or str(record.control)
    keys = [cause.key for cause in one.said.causes]
    places = [place for place, key in enumerate(keys, 1) if any(key in truth.keys for truth in record.truths)]
    facts = one.said.causes[0].evidence if one.said.causes else []
    return Miss(case=record.case, severity=record.severity, workload=record.workload, wanted=wanted, said=said,
                stood=f"place {places[0]}" if places else "not named", runs=[each.run for each in same],
                headline=one.said.headline,
                reasons=[f"{'+' if fact.supports else '-'} {fact.statement}" for fact in facts])  # fmt: skip


def _left_out(judgements: Sequence[Judgement]) -> list[str]:
    counts: dict[str, int] = {}
    for each in judgements:
        if not each.counts:
            name = f"{each.record.case}/{each.record.severity}"
            counts[name] = counts.get(name, 0) + 1
    return [f"{name} ({count} of its runs)" for name, count in sorted(counts.items())]


def _machines(folder: Path, runs: Sequence[str]) -> list[Machine]:
    days: dict[tuple[str, int | None, tuple[str, ...]], list[str]] = {}
    for name in runs:
        meta = RunDirectory(folder / name).meta()
        hardware, begun_ns = section(meta, "hardware"), section(meta, "wall_anchor").get("unix_ns") or 0
        gpus = tuple(str(gpu.get("name", gpu)) if isinstance(gpu, dict) else str(gpu)
                     for gpu in hardware.get("gpus") or ())  # fmt: skip
        machine = (str(hardware.get("cpu", "unknown")), hardware.get("cores"), gpus)
        days.setdefault(machine, []).append(time.strftime("%Y-%m-%d", time.gmtime(begun_ns / 1e9)))
    return [
        Machine(cpu=cpu, cores=cores, gpus=list(gpus), first_day=min(seen), last_day=max(seen))
        for (cpu, cores, gpus), seen in days.items()
    ]
