"""Lines of CSV and JSONL, one at a time: a long trace never stands in memory as a whole."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from loadgen.errors import ScenarioError
from loadgen.traces.row import bad_line

SHOWN_CHARACTERS = 80
T = TypeVar("T")


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
