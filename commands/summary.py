"""What runs begin and end with: the diagnosis, the terminal and HTML reports, and the command that opens the app."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sojourn.commands.cli import out, program_name, writing
from sojourn.metrics.exit_codes import of_run
from sojourn.metrics.installed import is_installed, say_missing

if TYPE_CHECKING:
    from sojourn.diagnosis.stored import Kept
    from sojourn.diagnosis.verdict import Diagnosis
    from sojourn.metrics.run.directory import RunDirectory


def diagnose_run(run: "RunDirectory", against: "RunDirectory | None" = None) -> "Diagnosis":
    """The diagnosis to show of a run. It is kept with the run, see `diagnose_and_keep`."""
    return diagnose_and_keep(run, against).diagnosis


def diagnose_and_keep(run: "RunDirectory", against: "RunDirectory | None" = None) -> "Kept":
    """Diagnoses a run, and keeps the diagnosis with it unless a better one lies there: then that one is shown. A report
    beside it is made again. A disk that does not take the files costs nothing but the files.

    Nothing is written of a run that is judged by a reader's bounds, or against another run: that is not its diagnosis.
    """
    from sojourn.diagnosis.expectation import with_expectation
    from sojourn.diagnosis.stored import FILE, Kept, keep_better
    from sojourn.live.watch.recorded import diagnose_recorded
    from sojourn.metrics.run.directory import REPORT
    from sojourn.scripting.predictor import predictor

    expected = with_expectation(run)
    diagnosis = diagnose_recorded(expected, against, predictor(expected))
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


def print_diagnosis(diagnosis: "Diagnosis") -> None:
    from sojourn.diagnosis.terminal.report import render

    out.print(render(diagnosis))


def summarise(run: "RunDirectory") -> int:
    """Diagnoses a finished run, prints and writes the reports. Returns the exit code. Raises SojournError where the run
    directory takes no report."""
    with writing(run.path, f"make room on the disk, then: {program_name()} diagnose {run.path}"):
        return _summarise(run)


def _summarise(run: "RunDirectory") -> int:
    from sojourn.metrics.compute.weight_error import weight_error_of
    from sojourn.metrics.machine.client_error import client_error_sentence
    from sojourn.metrics.memory.prefix_share import workload_lines
    from sojourn.metrics.memory.residence import residences_of
    from sojourn.metrics.request.goodput import measured
    from sojourn.metrics.run.directory import REPORT
    from sojourn.metrics.statistics.resolution import resolution_sentence

    kept = diagnose_and_keep(run)
    diagnosis = kept.diagnosis
    html = say_missing(["plotly"], "it")
    if is_installed("plotly"):
        report = run.path / REPORT
        html = report if kept.note and report.exists() else write_own_report(run, diagnosis)
    print_diagnosis(diagnosis)
    for line in workload_lines(run.meta(), measured(run.requests(), run.meta())):
        out.print(line)
    if (error := weight_error_of(run.meta())) is not None:
        out.print(f"weights        {error.sentence()}", markup=False)
    for residence in residences_of(run.meta()):
        out.print(f"model          {residence.sentence()}", markup=False)
    if (sentence := resolution_sentence(run.meta())) is not None:
        out.print(f"SLO question   {sentence}", markup=False)
    out.print(f"client error   {client_error_sentence(run.meta()['client_error'])}")
    out.print(f"HTML report    {html}", markup=False)
    out.print(f"run directory  {run.path}")
    out.print(f"open the app   {program_name()} ui {run.path}")
    overall = diagnosis.goodput[0]
    code, why = of_run(run.meta(), overall.completed, overall.sent - overall.completed)
    if why:
        print(f"sojourn: {why}", file=sys.stderr)
    return code
