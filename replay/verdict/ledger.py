"""The ledger of predictions: what a replay said that a change would give, and what a run with that change gave.

One file of JSON lines beside the runs, `predictions.jsonl`. A line is appended whole, so that several writers may
share it, and no line is ever changed.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.prediction import Change

FILE_NAME = "predictions.jsonl"


class Checked(msgspec.Struct, frozen=True, kw_only=True):
    """One figure that was predicted, and its measurement. Shares 0 to 1, milliseconds, requests per second."""

    name: str  # attainment, goodput_rps, ttft_ms:p50 …
    before: float | None  # in the first run
    low: float
    median: float
    high: float
    measured: float
    hit: bool  # within the bounds, give or take half a request where it is a share of them
    error: float  # measured less predicted: of a share in points (0 to 1), of others as a share of the median


class LedgerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A prediction and what became of it."""

    when: str  # ISO 8601, UTC: when it was verified
    build: str  # versions that made the second run
    run: str
    run2: str
    scenario: str
    change: Change
    predicted_by: str  # "diagnosis", "rival", "plan", or "replay" where nobody had said it before
    cause: str = ""  # key of the finding whose fix it was
    figures: list[Checked]  # the judged one first
    hit: bool  # of the first figure
    error: float  # of the first figure
    is_trusted: bool = True  # the replay had no doubts
    is_open: bool = False  # nearly every outcome lay within the bounds: a hit says nothing, and is not counted
    at_speed: Checked | None = None  # the first figure, predicted for the speed that the second run had
    longer: float | None = None  # times that a step of equal size took in the second run; None: not known

    @property
    def outcome(self) -> Literal["hit", "miss", "not predicted"]:
        return "not predicted" if self.is_open else "hit" if self.hit else "miss"


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """How good the predictions of a ledger were."""

    predictions: int
    hits: int
    mean_error: float | None  # of the absolute errors of the judged figures; None of an empty ledger
    worst_error: float | None

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.predictions if self.predictions else None


def ledger_beside(run: Path) -> Path:
    """The ledger of the folder that a run lies in."""
    return run.resolve().parent / FILE_NAME


def append(path: Path, entry: LedgerEntry) -> None:
    """Adds one line. Raises OSError."""
    line = msgspec.json.encode(entry) + b"\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        if _is_cut(descriptor):
            line = b"\n" + line
        if os.write(descriptor, line) != len(line):  # one write: lines of two writers never mix
            raise OSError(28, "the disk is full")
    finally:
        os.close(descriptor)


def read(path: Path) -> list[LedgerEntry]:
    """All entries, in the order in which they were made; none where there is no file.

    A line that a full disk cut short is left out. Raises RunDataError where the file cannot be read.
    """
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunDataError(f"{path} cannot be read: {error.strerror}") from None
    entries = []
    for line in lines:
        try:
            entries.append(msgspec.json.decode(line, type=LedgerEntry))
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
    return entries


def score(entries: Sequence[LedgerEntry]) -> Score:
    """Of the latest entry of each pair of runs and change: a pair that is verified twice counts once. What could not be
    predicted is not counted."""
    latest = {(entry.run, entry.run2, msgspec.json.encode(entry.change, order="sorted")): entry for entry in entries}
    latest = {key: entry for key, entry in latest.items() if not entry.is_open}
    errors = [abs(entry.error) for entry in latest.values()]
    return Score(
        predictions=len(errors),
        hits=sum(entry.hit for entry in latest.values()),
        mean_error=sum(errors) / len(errors) if errors else None,
        worst_error=max(errors, default=None),
    )


def _is_cut(descriptor: int) -> bool:
    """The last line has no end: its writer met a full disk."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
