"""Recorded traffic: when requests came and how long they were."""

import csv
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from loadgen.scenario_faults import ScenarioError

TRACE_FOLDER = Path(__file__).parent.parent / "scenarios" / "traces"
AZURE_2023_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One recorded request, in seconds from the first one of its trace."""

    offset_s: float
    prompt_tokens: int
    output_tokens: int


def find_trace(file: str) -> Path:
    """A trace by its path, or by its name in scenarios/traces."""
    for path in (Path(file), TRACE_FOLDER / file):
        if path.is_file():
            return path
    bundled = ", ".join(sorted(path.name for path in TRACE_FOLDER.glob("*.csv")))
    raise ScenarioError([f"arrivals.file {file!r} is neither a file nor a bundled trace; bundled are: {bundled}"])


def read_azure_trace(path: Path) -> list[TraceRow]:
    """An Azure LLM inference trace of 2023, told by its header. Times have 100 ns digits; we keep microseconds."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        header = next(lines, [])
        if header != AZURE_2023_COLUMNS:
            raise ScenarioError(
                [f"{path.name} begins with {','.join(header)[:80]!r}, not with {','.join(AZURE_2023_COLUMNS)!r}; "
                 "format azure reads the conv and code traces of 2023"]
            )  # fmt: skip
        rows = [_azure_row(path, number, line) for number, line in enumerate(lines, start=2) if line]
    if not rows:
        raise ScenarioError([f"{path.name} has a header but no requests"])
    rows.sort(key=lambda row: row[0])
    first = rows[0][0]
    return [TraceRow((when - first).total_seconds(), prompt, output) for when, prompt, output in rows]


def _azure_row(path: Path, number: int, line: list[str]) -> tuple[datetime, int, int]:
    try:
        when, prompt, output = line
        return datetime.fromisoformat(when[:26]), int(prompt), int(output)
    except ValueError:
        raise ScenarioError([f"{path.name} line {number}: {','.join(line)[:80]!r} is not time,tokens,tokens"]) from None
