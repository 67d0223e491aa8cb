"""What runs begin and end with: the diagnosis, the terminal and HTML reports, and the command that opens the app."""

import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.commands.cli import out, program_name, writing
from sojourn.metrics.exit_codes import of_run
from sojourn.metrics.installed import is_installed, say_missing
from sojourn.metrics.time_limit import TimeLimit

if TYPE_CHECKING:
    from sojourn.diagnosis.stored import Kept
    from sojourn.diagnosis.verdict import Diagnosis
    from sojourn.metrics.run.directory import RunDirectory


# A verdict is there 15 s after the last request: the server's end and the client's records take a second or two.
REFERENCE_SECONDS = 5.5  # of the measurement of normal speed behind a run
DIAGNOSIS_SECONDS = 7.5  # of reading the run and its replays


def diagnose_run(run: "RunDirectory", against: "RunDirectory | None" = None, *, thorough: bool = False) -> "Diagnosis":
    """The diagnosis to show of a run. It is kept with the run, see `diagnose_and_keep`."""
    return diagnose_and_keep(run, against, thorough=thorough).diagnosis


def diagnose_and_keep(run: "RunDirectory", against: "RunDirectory | None" = None, *, thorough: bool = False) -> "Kept":
    """Diagnoses a run, and keeps the diagnosis with it unless a better one lies there: then that one is shown. A report
    beside it is made again. A disk that does not take the files costs nothing but the files.

    Nothing is written of a run that is judged by a reader's bounds, or against another run: that is not its diagnosis.
    `thorough` takes as long as it needs, and measures the normal speed first, where this is the machine of the run.
    """
    from sojourn.diagnosis.expectation import with_expectation
    from sojourn.diagnosis.stored import FILE, Kept, keep_better
    from sojourn.live.watch.recorded import diagnose_recorded
    from sojourn.metrics.run.directory import REPORT
    from sojourn.scripting.predictor import predictor

    limit = None if thorough else TimeLimit(DIAGNOSIS_SECONDS)
    if thorough:
        _measure_speed(run)
    expected = with_expectation(run)
    diagnosis = diagnose_recorded(expected, against, predictor(expected, limit), limit)
    if run.objectives is not None or against is not None:
        return Kept(diagnosis, False, "")
    has_report = (run.path / REPORT).exists()
    try:
        kept = keep_better(run, diagnosis)
        if kept.is_new and has_report and is_installed("plotly"):
            write_own_report(run, kept.diagnosis)
    except OSError as error:
        print(f"sojourn: {run.path / FILE} cannot be written: {error.strerror}", file=sys.stderr)
        return Kept(diagnosis, False, "")
    if kept.note:
        print(f"sojourn: {kept.note}", file=sys.stderr)
    return kept


def write_own_report(run: "RunDirectory", diagnosis: "Diagnosis") -> Path:
    """The report that lies with the run. Raises OSError."""
    from sojourn.metrics.run.directory import OLD_REPORT, REPORT
    from sojourn.ui.markup.run_report import write_report

    written = write_report(run, diagnosis, run.path / REPORT)
    (run.path / OLD_REPORT).unlink(missing_ok=True)
    return written


def _measure_speed(run: "RunDirectory") -> None:
    """The normal speed beside a run that has none, where this is the run's own machine."""
    from sojourn.loadgen.run.speed import add_reference
    from sojourn.metrics.errors import RunDataError
    from sojourn.metrics.machine.host import hardware

    def of_machine(found: dict) -> dict:
        return {name: value for name, value in found.items() if name not in ("boot_id", "host_cores")}

    if of_machine(run.meta().get("hardware") or {}) != of_machine(hardware()) or not is_installed("torch"):
        return
    with suppress(RunDataError, OSError):
        add_reference(run, planted=True, progress=lambda: None)


def print_diagnosis(
    diagnosis: "Diagnosis", run: "RunDirectory", verbose: bool, ends: Sequence[tuple[str, str]] = (),
    options: Sequence[str] = (),
) -> None:  # fmt: skip
    """The whole report, or what fits on one screen. `ends` are labels and texts below either; `options` are those of
    the `diagnose` that made the diagnosis."""
    if verbose:
        from sojourn.diagnosis.terminal.report import render

        out.print(render(diagnosis))
        for label, text in ends:
            out.print(f"{label:<14} {text}", markup=False)
        return
    from sojourn.diagnosis.terminal.short_report import ShortReport

    command = shlex.join(["diagnose", str(run.path), *options, "-v"])
    out.print(ShortReport(diagnosis, f"{program_name()} {command}", ends))


def summarise(run: "RunDirectory", verbose: bool = False) -> int:
    """Diagnoses a finished run, prints and writes the reports. Returns the exit code. Raises SojournError where the run
    directory takes no report."""
    with writing(run.path, f"make room on the disk, then: {program_name()} diagnose {run.path}"):
        return _summarise(run, verbose)


def _summarise(run: "RunDirectory", verbose: bool) -> int:
    from sojourn.metrics.run.directory import REPORT

    kept, has_plotly = diagnose_and_keep(run), is_installed("plotly")
    diagnosis, report = kept.diagnosis, run.path / REPORT
    html = report if has_plotly else say_missing(["plotly"], "it")
    print_diagnosis(
        diagnosis, run, verbose, [*next_steps(run, diagnosis), ("HTML report", str(html)), *_about(run, verbose)]
    )
    if has_plotly and not (kept.note and report.exists()):  # behind the verdict, since it takes seconds
        write_own_report(run, diagnosis)
    overall = diagnosis.goodput[0]
    code, why = of_run(run.meta(), overall.completed, overall.sent - overall.completed)
    if why:
        print(f"sojourn: {why}", file=sys.stderr)
    return code


def next_steps(run: "RunDirectory", diagnosis: "Diagnosis") -> list[tuple[str, str]]:
    """What a reader does next, the most important first."""
    from sojourn.metrics.statistics.resolution import resolution_sentence

    path = shlex.quote(str(run.path))
    resolved = resolution_sentence(run.meta())
    return [
        *([("SLO question", resolved)] if resolved is not None else []),
        *([("next", step)] if (step := _next_step(run, diagnosis)) else []),
        ("in the app", f"{program_name()} ui {path}"),
    ]


def _next_step(run: "RunDirectory", diagnosis: "Diagnosis") -> str:
    """The command that shows more of this run: a slow request, where its server recorded it, or how to record it. ""
    where nothing is open, and where a finding says the same."""
    from sojourn.metrics.request.objectives import short

    overall = diagnosis.goodput[0]
    if diagnosis.closure.joined:
        missed = sorted(overall.missed_by_objective, key=lambda name: -overall.missed_by_objective[name])
        known = [name for name in (*missed, *overall.quantiles_ms) if overall.quantiles_ms[name]["max"] is not None]
        path = shlex.quote(str(run.path))
        return f"{program_name()} explain {path} --slowest {short(known[0])}" if known else ""
    proved = any(found.probe.measurement in diagnosis.unrecorded for found in diagnosis.findings)
    return "" if diagnosis.state == "healthy" or proved or not overall.sent else diagnosis.unrecorded


def _about(run: "RunDirectory", verbose: bool) -> list[tuple[str, str]]:
    """What a run says of its workload, and where all is printed of its model and its client."""
    from sojourn.metrics.compute.weight_error import weight_error_of
    from sojourn.metrics.machine.client_error import client_error_sentence
    from sojourn.metrics.memory.prefix_share import workload_lines
    from sojourn.metrics.memory.residence import residences_of
    from sojourn.metrics.request.goodput import measured

    meta = run.meta()
    lines = [("workload", line) for line in workload_lines(meta, measured(run.requests(), meta))]
    if not verbose:
        return lines
    error = weight_error_of(meta)
    return [
        *lines,
        *([("weights", error.sentence())] if error is not None else []),
        *(("model", residence.sentence()) for residence in residences_of(meta)),
        ("client error", client_error_sentence(meta["client_error"])),
        ("run directory", str(run.path)),
    ]
