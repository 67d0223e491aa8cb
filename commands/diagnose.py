"""`sojourn diagnose`: what a run suffers from, and why."""

from pathlib import Path
from typing import Annotated

import typer

from commands.cli import RunArgument, open_run
from commands.summary import diagnose_run, print_diagnosis


def diagnose(
    run: RunArgument,
    against: Annotated[
        Path | None,
        typer.Option(help="a second run: explains why a good benchmark feels slow, or why more GPUs did not help"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print diagnosis.json instead of the report")] = False,
) -> None:
    """Say what a run suffers from, which lifecycle it comes from, and which experiment would prove it."""
    opened = open_run(run)
    diagnosis = diagnose_run(opened, open_run(against) if against else None)
    if json:
        print((opened.path / "diagnosis.json").read_text(encoding="utf-8"), end="")
    else:
        print_diagnosis(diagnosis)
