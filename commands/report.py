"""`sojourn report`: a run as one HTML file."""

from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import (
    RunArgument,
    SloOption,
    need,
    open_run,
    out,
    output_option,
    slo_objectives,
    working,
    writing,
)
from sojourn.commands.summary import diagnose_run


def report(
    run: RunArgument,
    output: Annotated[Path | None, output_option("file to write; by default report.html in the run")] = None,
    against: Annotated[Path | None, typer.Option(help="a second run to compare with")] = None,
    slo: SloOption = None,
) -> None:
    """Write a run's diagnosis and figures as one self-contained HTML file."""
    need("plotly")
    from sojourn.ui.markup.run_report import write_report

    objectives = slo_objectives(slo)
    opened = open_run(run, objectives)
    other = open_run(against, objectives) if against else None
    path = output or opened.path / "report.html"
    with writing(path), working(f"diagnosing and drawing {opened.name}"):
        written = write_report(opened, diagnose_run(opened, other), path, other)
    out.print(f"wrote {written}")
