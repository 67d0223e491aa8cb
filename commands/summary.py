"""What runs begin and end with: the diagnosis, the terminal and HTML reports, and the command that opens the app."""

import sys
from typing import TYPE_CHECKING

import msgspec

from sojourn.commands.cli import out, program_name, writing
from sojourn.metrics.exit_codes import of_run
from sojourn.metrics.installed import is_installed, say_missing

if TYPE_CHECKING:
    from sojourn.diagnosis.verdict import Diagnosis
    from sojourn.metrics.run.directory import RunDirectory


def diagnose_run(run: "RunDirectory", against: "RunDirectory | None" = None) -> "Diagnosis":
    """Diagnoses a run and writes its diagnosis.json; a disk that does not take the file costs nothing but the file.

    Of a run that is judged by a reader's bounds nothing is written: they are not those of the run.
    """
    from sojourn.diagnosis.expectation import with_expectation
    from sojourn.live.watch.recorded import diagnose_recorded
    from sojourn.scripting.predictor import predictor

    expected = with_expectation(run)
    diagnosis = diagnose_recorded(expected, against, predictor(expected))
    if run.objectives is not None:
        return diagnosis
    try:
        run.write_json("diagnosis.json", msgspec.to_builtins(diagnosis))
    except OSError as error:
        print(f"sojourn: {run.path / 'diagnosis.json'} cannot be written: {error.strerror}", file=sys.stderr)
    return diagnosis


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
    from sojourn.metrics.statistics.resolution import resolution_sentence

    diagnosis = diagnose_run(run)
    html = say_missing(["plotly"], "it")
    if is_installed("plotly"):
        from sojourn.ui.markup.run_report import write_report

        html = write_report(run, diagnosis, run.path / "report.html")
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
