"""BurstGPT: ChatGPT and GPT-4 traffic of a university, CSV of six columns, or of eight with sessions.

Wang et al., "BurstGPT", KDD 2025. A request that failed has no response tokens: it is left out, and counted.
"""

from collections.abc import Iterator
from pathlib import Path

from sojourn.loadgen.traces.row import Head, Tally, TraceForm, TraceRow, Window, bad_line, csv_lines, whole

SIX = ["Timestamp", "Model", "Request tokens", "Response tokens", "Total tokens", "Log Type"]
EIGHT = ["Timestamp", "Session ID", "Elapsed time", *SIX[1:]]
FAILED = "failed: 0 response tokens"


def _recognises(head: Head) -> bool:
    return head.first_line.split(",") in (SIX, EIGHT)


def _rows(path: Path, _window: Window, tally: Tally) -> Iterator[TraceRow]:
    with path.open(encoding="utf-8-sig") as file:
        columns = file.readline().strip().split(",")
    for number, cells in csv_lines(path):
        if len(cells) != len(columns):
            raise bad_line(path, number, f"it has {len(cells)} cells; the header names {len(columns)}")
        row = dict(zip(columns, cells, strict=True))
        try:
            since_s = float(row["Timestamp"])
        except ValueError:
            raise bad_line(path, number, f"Timestamp is {row['Timestamp']!r}; it must be seconds") from None
        prompt = whole(path, number, "Request tokens", row["Request tokens"])
        output = whole(path, number, "Response tokens", row["Response tokens"])
        if not output:
            tally[FAILED] += 1
            continue
        yield TraceRow(since_s, prompt, output, session_id=row.get("Session ID", ""))


BURSTGPT = TraceForm("burstgpt", f"CSV with the header {','.join(SIX)}, or with Session ID and Elapsed time after "
                     "Timestamp (BurstGPT)", _recognises, _rows)  # fmt: skip
