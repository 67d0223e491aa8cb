"""Azure's LLM inference traces of 2023 and 2024: when each request came, and how long it was.

Patel et al., "Splitwise", ISCA 2024 (2023); Stojkovic et al., "DynamoLLM", HPCA 2025 (2024). The columns are the same;
2023 has seven digits after the second and no time zone, 2024 up to six digits and +00:00.
"""

import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from sojourn.loadgen.traces.row import Head, Tally, TraceForm, TraceRow, Window, bad_line, csv_lines, whole

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
_BEYOND_MICROSECONDS = re.compile(r"(\.\d{6})\d+")  # datetime keeps six digits


def _recognises(head: Head) -> bool:
    return head.first_line.split(",") == COLUMNS


def _rows(path: Path, _window: Window, _tally: Tally) -> Iterator[TraceRow]:
    first: datetime | None = None
    for number, cells in csv_lines(path):
        if len(cells) != len(COLUMNS):
            raise bad_line(path, number, f"{','.join(cells)[:80]!r} is not time,tokens,tokens")
        try:
            when = datetime.fromisoformat(_BEYOND_MICROSECONDS.sub(r"\1", cells[0]))
            first = first or when
            since_s = (when - first).total_seconds()
        except (ValueError, TypeError):  # TypeError: one line has a time zone, another none
            raise bad_line(path, number, f"TIMESTAMP is {cells[0]!r}; it must be like that of line 2") from None
        prompt, output = (whole(path, number, *cell) for cell in zip(COLUMNS[1:], cells[1:], strict=True))
        yield TraceRow(since_s, prompt, output)


AZURE = TraceForm("azure", f"CSV with the header {','.join(COLUMNS)} (Azure 2023 and 2024)", _recognises, _rows)
