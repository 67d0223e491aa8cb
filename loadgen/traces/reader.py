"""Reads a trace of any form: the beginning of the file decides which.

A new form is a `TraceForm` in a file of its own and a line in FORMS.
"""

import json
from array import array
from dataclasses import dataclass, replace
from pathlib import Path

from sojourn.loadgen.errors import ScenarioError
from sojourn.loadgen.traces.agents import KV_CACHE_TESTER
from sojourn.loadgen.traces.azure import AZURE
from sojourn.loadgen.traces.blocks import BAILIAN, MOONCAKE
from sojourn.loadgen.traces.burstgpt import BURSTGPT
from sojourn.loadgen.traces.clock import refuse_another_unit
from sojourn.loadgen.traces.genai_spans import GENAI_SPANS
from sojourn.loadgen.traces.plain import PLAIN, SHAREGPT
from sojourn.loadgen.traces.rounding import Bins, Rounding
from sojourn.loadgen.traces.row import Head, Tally, TraceForm, TraceRow, Window, files_of
from sojourn.loadgen.traces.servegen import SERVEGEN

FORMS: tuple[TraceForm, ...] = (
    AZURE, BURSTGPT, MOONCAKE, BAILIAN, SERVEGEN, KV_CACHE_TESTER, GENAI_SPANS, SHAREGPT, PLAIN,
)  # fmt: skip
TRACE_FOLDER = Path(__file__).parents[2] / "scenarios" / "traces"
LONGEST_FIRST_LINE = 64 * 2**20  # a file of one JSON object is a line, or has some


@dataclass(frozen=True, slots=True)
class TraceSlice:
    """The rows of a window of a trace, in order of time, and facts about the whole file."""

    path: Path
    form: TraceForm
    rows: list[TraceRow]  # times from the trace's first request; in the file's order where the form has no times
    num_rows: int  # in the whole file
    end_s: float  # of the last one; 0 without times
    timed: bool
    left_out: dict[str, int]
    bins: Bins  # that all times of the file are rounded to

    @property
    def block_tokens(self) -> int:
        """That one of the file's hash ids stands for; 0 where it has none."""
        return next((row.block_tokens for row in self.rows), self.form.block_tokens)


def find_trace(file: str) -> Path:
    """A trace by its path, or by its name in scenarios/traces."""
    for path in (Path(file), TRACE_FOLDER / file):
        if path.exists() and file:
            return path
    bundled = ", ".join(sorted(path.name for path in TRACE_FOLDER.iterdir() if path.suffix in (".csv", ".jsonl")))
    raise ScenarioError(f"file {file!r} is neither a file nor a bundled trace; bundled are: {bundled}")


def read_trace(path: Path, form: str = "auto", window: Window | None = None) -> TraceSlice:
    """The rows of a window, or all. The file is read line by line: only the rows of the window stay in memory.

    Raises ScenarioError for an unknown form or another than `form`, a wrong line (with file and number), a file without
    rows, and a form without requests if there is no window.
    """
    try:
        chosen = form_of(path)
        if form not in ("auto", chosen.name):
            raise ScenarioError(f"{path.name} is a file of the form {chosen.name}, not {form}; leave format out")
        if chosen is SERVEGEN and window is None:
            raise ScenarioError(
                f"{path.name} is of the form servegen, which has no requests: they are drawn from its rates, for a "
                "time; name it in arrivals.file, with process: trace and duration_s, and take lengths from there with "
                "distribution: trace"
            )
        window = window or Window()
        if not chosen.has_unit and (window.seconds_per_unit or window.hash_tokens):
            raise ScenarioError(
                f"{path.name} is a file of the form {chosen.name}, which fixes its times and blocks: leave "
                "arrivals.seconds_per_unit and arrivals.hash_tokens out (--timed-trace-… of bench-serve)"
            )
        return _walk(path, chosen, window)
    except OSError as error:
        raise ScenarioError(f"{path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{path.name} is not UTF-8 text") from None


def form_of(path: Path) -> TraceForm:
    """The form of a file by its first line. Raises ScenarioError with a list of the forms."""
    if path.is_dir():
        if any(path.glob("chunk-*-trace.csv")):
            return SERVEGEN
        if first := next(iter(files_of(path)), None):
            return form_of(first)
        raise _unknown(f"{path.name} is a folder without chunk-<i>-trace.csv and without .json")
    with path.open("rb") as file:
        line = file.readline(LONGEST_FIRST_LINE).decode("utf-8-sig").strip()
        value = _json(line)
        if value is None and line.startswith("{"):
            value = _json(line + file.read(LONGEST_FIRST_LINE).decode("utf-8", "replace"))
    head = Head(path, line, value if isinstance(value, dict) else None)
    for form in FORMS:
        if form.recognises(head):
            return form
    raise _unknown(f"{path.name} begins with {head.first_line[:80]!r}")


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _unknown(beginning: str) -> ScenarioError:
    known = "\n".join(f"  {form.name}: {form.looks_like}" for form in FORMS)
    return ScenarioError(f"{beginning}, which no known form of trace does; known are:\n{known}")


def _walk(path: Path, form: TraceForm, window: Window) -> TraceSlice:
    """Most files are in order, so that the first time is the least; another file is read a second time."""
    origin_s: float | None = 0.0 if form is SERVEGEN else None  # its seconds are the trace's own, drawn or not
    while True:
        tally, selected, count, rounding = Tally(), [], 0, Rounding()
        earliest, latest, stamps = origin_s, 0.0, array("d")
        for row in form.rows(path, window, tally):
            count += 1
            if row.offset_s is None:
                selected.append(row)
                continue
            stamps.append(row.offset_s)
            origin_s = row.offset_s if origin_s is None else origin_s
            earliest = row.offset_s if earliest is None else min(earliest, row.offset_s)
            latest = max(latest, row.offset_s)
            offset_s = row.offset_s - origin_s
            rounding.add(offset_s)
            if window.start_s <= offset_s < window.end_s:
                selected.append(replace(row, offset_s=offset_s))
        if earliest is None or earliest >= origin_s:
            break
        origin_s = earliest
    if window.seconds_per_unit is None:  # else the user says that it is one
        refuse_another_unit(path.name, stamps)
    if not count and form is not SERVEGEN:  # of that one, nothing was drawn outside of the window
        dropped = f" ({', '.join(f'{number} {reason}' for reason, number in tally.items())})"
        raise ScenarioError(f"{path.name} holds no requests{dropped if tally else ''}")
    timed = origin_s is not None
    if timed:
        selected.sort(key=lambda row: row.offset_s)  # stable: those of one moment stay in the file's order
    end_s = latest - (origin_s or 0.0)
    return TraceSlice(path, form, selected, count, end_s, timed, dict(tally), rounding.bins)
