"""Runs the cases one after another, a fresh server for each run, and goes on where an earlier call ended.

A run is finished once its `fault.json` is there: what has none was cut short, and is measured again.
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from sojourn.diagnosis.score.judgement import hurts
from sojourn.diagnosis.score.scoring import attainment
from sojourn.diagnosis.score.truth import FAULT_FILE, FaultRecord, write_fault
from sojourn.loadgen.faults.case import Case, Variant
from sojourn.loadgen.faults.surroundings import PlantedSurroundings
from sojourn.loadgen.run.experiment import OnProgress, run_scenario
from sojourn.loadgen.target.processes import ServerDied
from sojourn.metrics.errors import ExperimentError, SojournError
from sojourn.metrics.run.directory import RunDirectory

BURST_AFTER_S = 6.0  # in the middle of the load


@dataclass(frozen=True, slots=True)
class PlannedRun:
    case: Case
    variant: Variant
    repeat: int  # the first is 1

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.case.name}--{self.variant.severity}--{self.repeat}"

    @property
    def seed(self) -> int:
        """Of the arrivals: the same in each case, another one in each repeat."""
        return self.variant.scenario.measure.seed + self.repeat - 1

    @property
    def record(self) -> FaultRecord:
        case, variant = self.case, self.variant
        is_base = case.name == case.base
        return FaultRecord(
            case=case.name, workload=case.base, severity=variant.severity, repeat=self.repeat,
            truths=list(variant.truths), control=case.control, base=None if is_base else case.base, plant=variant.plant,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """`attainment` is of all measured requests; `base` that of the workload without the fault, None if it did not
    run."""

    planned: PlannedRun
    attainment: float
    base: float | None
    number: int
    of: int
    seconds_left: float | None

    @property
    def hurts(self) -> bool | None:
        """Whether the client's own records show the fault. None for a control, and without a base."""
        if self.planned.case.control is not None or self.base is None:
            return None
        return hurts(self.attainment, self.base)


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that could not be made; the next call tries it again."""

    planned: PlannedRun
    error: SojournError


Execute = Callable[[PlannedRun, Path, OnProgress], RunDirectory]


def run_planned(
    planned: PlannedRun, run_dir: Path, progress: OnProgress = lambda _: None, *, profiles: bool = False
) -> RunDirectory:
    """One run of a case, with its faults around it. A server that was planted to die leaves its run. Raises
    SojournError.

    `profiles` some steps: the profiler slows a core on a CPU for seconds, so that such runs are comparable to each
    other only.
    """
    scenario = planned.variant.scenario.with_path(run_dir / "scenario.yaml")
    surroundings = surroundings_of(planned.variant, profiles=profiles)
    with TemporaryDirectory(prefix="sojourn-kv-") as empty:  # a tier that an earlier run filled would be another run
        own = {"kv_disk_path": empty} if "kv_disk_path" in scenario.engine else {}
        try:
            return run_scenario(
                scenario, run_dir, engine_overrides=own, seed=planned.seed, scrapes=True, progress=progress,
                surroundings=surroundings,
            )  # fmt: skip
        except ServerDied:
            return RunDirectory.open(run_dir)


def surroundings_of(variant: Variant, *, profiles: bool) -> PlantedSurroundings | None:
    """What stands around a run of the variant; None where that is nothing."""
    burst_after_s = BURST_AFTER_S if profiles else None
    return PlantedSurroundings(variant.around, burst_after_s) if variant.around or profiles else None


def plan_runs(cases: Sequence[Case], repeats: int, first_repeat: int = 1) -> list[PlannedRun]:
    """The first repeat of all comes before the second. A base workload runs shortly before the cases on it, because
    the speed of a machine drifts."""
    ordered = sorted(cases, key=lambda case: (case.base, case.name != case.base))
    return [
        PlannedRun(case, variant, repeat)
        for repeat in range(first_repeat, first_repeat + repeats)
        for case in ordered
        for variant in case.variants
    ]


@dataclass(slots=True)
class Campaign:
    """The runs of a folder. Raises ExperimentError where another program uses it."""

    folder: Path
    execute: Execute = run_planned
    clock: Callable[[], float] = time.monotonic
    _attainments: dict[str, float] = field(default_factory=dict)

    def run(
        self, planned: Sequence[PlannedRun], progress: OnProgress = lambda _: None
    ) -> Iterator[FinishedRun | FailedRun]:
        """Yields each run that it makes; those that an earlier call has finished are left out."""
        with self._locked():
            missing = [each for each in planned if not (self.folder / each.name / FAULT_FILE).is_file()]
            seconds = []
            for number, each in enumerate(missing, 1):
                begin = self.clock()
                path = self.folder / each.name
                if path.exists():
                    shutil.rmtree(path)
                try:
                    write_fault(self.execute(each, path, progress), each.record)
                except SojournError as error:  # one case that cannot run does not end a night of others
                    yield FailedRun(each, error)
                    continue
                seconds.append(self.clock() - begin)
                left = sum(seconds) / len(seconds) * (len(missing) - number)
                base = self.attainment(f"{each.case.base}--0--{each.repeat}")
                yield FinishedRun(each, self.attainment(each.name) or 0.0, base, number, len(missing), left)

    def attainment(self, name: str) -> float | None:
        """Of a finished run of this folder; None where there is none."""
        if name not in self._attainments:
            if not (self.folder / name / FAULT_FILE).is_file():
                return None
            self._attainments[name] = attainment(RunDirectory.open(self.folder / name))
        return self._attainments[name]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise ExperimentError(f"{self.folder} cannot be used: {error.strerror}; choose another folder") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError:
            raise ExperimentError(
                f"cases run in {self.folder} already; wait for their end, or choose another"
            ) from None
        finally:
            os.close(lock)
