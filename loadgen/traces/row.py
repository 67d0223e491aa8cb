"""One recorded request of any form of file, the interface of a form, and readers of CSV and JSONL.

Files are read line by line: a long trace never stands in memory as a whole.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from sojourn.loadgen.errors import ScenarioError

SHOWN_CHARACTERS = 80
T = TypeVar("T")
Tally = Counter[str]  # reason → rows left out: they have no request that could be sent


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request. A form without a field leaves its default."""

    offset_s: float | None = None  # from the first request of the trace; None where the form has no times
    prompt_tokens: int = 0
    output_tokens: int | None = None  # None: not recorded
    hash_ids: tuple[int, ...] = ()  # equal ids at equal positions, after equal ones, stand for equal tokens
    block_tokens: int = 0  # that one of the ids stands for
    klass: str = ""
    session_id: str = ""  # a name for the records: an open replay sends each row at its own time
    content: str = ""  # JSON of the recorded text (a string) or messages (a list)
    place: int = 0  # in its session
    after: tuple[int, ...] | None = None  # places of the rows that end before it; (): none; None: the form tells none
    pause_s: float = 0.0  # from the last of those ends, or from the begin of the session
    agent: str = ""  # which agent of the session sends it; "" for the first one


@dataclass(frozen=True, slots=True)
class Window:
    """A window in seconds from the first request of a trace, the seed of draws, and what the reader knows of the file:
    None is told by the file."""

    start_s: float = 0.0
    end_s: float = float("inf")
    seed: int = 0
    seconds_per_unit: float | None = None  # of numeric timestamps
    hash_tokens: int | None = None  # that one of the hash ids stands for


@dataclass(frozen=True, slots=True)
class Head:
    """The beginning of a file, which decides its form."""

    path: Path
    first_line: str
    first_object: dict | None  # the first line as a JSON object, or the whole file where it is one


@dataclass(frozen=True, slots=True)
class TraceForm:
    """One form of file. `rows` yields rows with times on the trace's own clock, in any order; raises ScenarioError."""

    name: str
    looks_like: str
    recognises: Callable[[Head], bool]
    rows: Callable[[Path, Window, Tally], Iterator[TraceRow]]
    block_tokens: int = 0  # that one of its hash ids stands for, if the file does not imply another; 0: it has none
    has_unit: bool = False  # whether Window.seconds_per_unit and hash_tokens say something of it


def files_of(path: Path) -> list[Path]:
    """The file, or those of a folder with one session or trace in each."""
    return sorted(path.glob("*.json")) if path.is_dir() else [path]


def bad_line(path: Path, number: int, reason: str) -> ScenarioError:
    return ScenarioError(f"{path.name} line {number}: {reason}")


def json_lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T]]:
    """(line number, object) of each line that is not empty. Raises ScenarioError with the line and its fault."""
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                yield number, decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                shown = line[:SHOWN_CHARACTERS].decode("utf-8", "replace").strip()
                raise bad_line(path, number, f"{shown!r}: {error}") from None


def csv_lines(path: Path, has_header: bool = True) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each line after the header that is not empty."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        try:
            for number, line in enumerate(lines, start=1):
                if line and not (has_header and number == 1):
                    yield number, line
        except UnicodeDecodeError:
            raise ScenarioError(f"{path.name} is not UTF-8 text") from None
        except csv.Error as error:
            raise bad_line(path, lines.line_num, str(error)) from None


def whole(path: Path, number: int, name: str, cell: str) -> int:
    """A count of tokens. Raises ScenarioError for what is none."""
    try:
        value = int(cell)
    except ValueError:
        raise bad_line(path, number, f"{name} is {cell[:SHOWN_CHARACTERS]!r}; it must be a whole number") from None
    if not 0 <= value <= 10_000_000:
        raise bad_line(path, number, f"{name} is {value}; it must be from 0 to 10,000,000")
    return value
