"""What a benchmark gives: every repeat of every figure, with all that another reader needs to judge it."""

import shlex
import statistics
import sys
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import msgspec

from sojourn.metrics.compute.roofline import Ceilings
from sojourn.metrics.errors import InputError
from sojourn.metrics.machine.host import hardware, versions
from sojourn.metrics.whole_file import write_whole


class BenchError(InputError):
    """A benchmark that cannot run with these options."""


class Row(msgspec.Struct, frozen=True):
    """One figure of a single kernel."""

    kernel: str
    case: str  # shape and dtype
    microseconds: float
    achieved: float | None = None  # in `unit`
    unit: str = ""  # GB/s, TFLOP/s
    percent_of_limit: float | None = None  # of the measured ceiling that bounds it


class Point(msgspec.Struct):
    """One engine at one point of a benchmark. Each figure has one value a repeat, in the order they were measured."""

    engine: str
    point: str  # the workload, or the concurrency
    settings: dict[str, object] = {}
    facts: dict[str, object] = {}  # what the engine said of itself: device, dtype, threads …
    peer: bool = False
    version: str = ""  # of a peer
    figures: dict[str, list[float]] = {}
    breakdowns: list[dict[str, float]] = []  # share of each repeat's wall time, by what it was spent on

    def add(self, figures: dict[str, float], breakdown: dict[str, float] | None = None) -> None:
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)
        if breakdown is not None:
            self.breakdowns.append(breakdown)

    def median(self, figure: str) -> float | None:
        values = self.figures.get(figure)
        return statistics.median(values) if values else None


class Report(msgspec.Struct):
    """One run of `sojourn dev bench`."""

    kind: str  # offline, online, kernels
    title: str
    command: str
    date: str  # ISO 8601, UTC
    hardware: dict[str, object]
    versions: dict[str, str]
    workload: dict[str, object] = {}
    ceilings: Ceilings | None = None
    points: list[Point] = []
    rows: list[Row] = []
    notes: list[str] = []

    def at(self, engine: str, point: str) -> Point:
        """The point of that name; a new one where there is none yet."""
        for known in self.points:
            if (known.engine, known.point) == (engine, point):
                return known
        self.points.append(Point(engine, point))
        return self.points[-1]

    def ratios(self, engine: str, base: str, point: str, figure: str) -> list[float]:
        """`engine` over `base`, repeat by repeat: what slowed the machine for a while slowed both."""
        pair = [self.at(name, point).figures.get(figure, []) for name in (engine, base)]
        return [value / of for value, of in zip(*pair, strict=False) if of]


def new_report(kind: str, title: str, **fields: object) -> Report:
    """With what this process knows of its machine and of how it was called, but for the file that it writes."""
    words = [word for before, word in pairwise(["sojourn", *sys.argv[1:]]) if "--json" not in (before, word)]
    command = shlex.join(["sojourn", *words])
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Report(kind, title, command, now, hardware(), versions(), **fields)


def write_report(report: Report, path: Path) -> None:
    """As JSON, all or nothing."""
    try:
        write_whole(path, msgspec.json.format(msgspec.json.encode(report), indent=1))
    except OSError as error:
        raise BenchError(f"--json {path} cannot be written: {error.strerror}; choose another file") from None


def read_report(path: Path) -> Report:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{path} is no report of sojourn dev bench: {error}") from None
