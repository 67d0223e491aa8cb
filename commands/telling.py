"""What a run ends with, whichever verb made it: the diagnosis, the report, and the line that opens the app."""

import importlib.util
import os
import shutil
import sys

import msgspec

from commands.frame import out
from loadgen.exit_code import exit_code
from metrics.diagnosis.verdict import Diagnosis
from metrics.machine.client_error import client_error_sentence
from metrics.run.directory import RunDirectory


def diagnose_run(opened: RunDirectory, against: RunDirectory | None = None) -> Diagnosis:
    """Diagnoses a run and keeps the answer beside it."""
    from metrics.diagnosis.diagnose import diagnose as run_diagnosis

    diagnosis = run_diagnosis(opened, against)
    opened.write_json("diagnosis.json", msgspec.to_builtins(diagnosis))
    return diagnosis


def print_diagnosis(diagnosis: Diagnosis) -> None:
    from metrics.diagnosis.terminal.report import render

    out.print(render(diagnosis))


def program() -> str:
    """How to call this program again from here."""
    if shutil.which("sojourn"):
        return "sojourn"
    return "python -m sojourn" if sys.argv[0].endswith(".py") else os.path.relpath(sys.argv[0])


def tell(done: RunDirectory) -> int:
    """What every run ends with: the terminal report, the HTML report, and the line that opens the app.

    Returns the exit code that says how it ended.
    """
    from metrics.memory.prefix_share import workload_lines
    from metrics.request.goodput import measured

    diagnosis = diagnose_run(done)
    html = "needs plotly: pip install '.[ui]', then sojourn report"
    if importlib.util.find_spec("plotly"):
        from ui.html.run_report import write_report

        html = write_report(done, diagnosis, done.path / "report.html")
    print_diagnosis(diagnosis)
    for line in workload_lines(done.meta(), measured(done.requests(), done.meta())):
        out.print(line, highlight=False)
    out.print(f"client error   {client_error_sentence(done.meta()['client_error'])}", highlight=False)
    out.print(f"HTML report    {html}", highlight=False, markup=False)
    out.print(f"run directory  {done.path}", highlight=False)
    out.print(f"open the app   {program()} ui {done.path}", highlight=False)
    return exit_code(diagnosis.state != "invalid", diagnosis.goodput[0].completed)
