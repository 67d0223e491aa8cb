"""`sojourn diagnose`: what a run suffers from, and why."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import (
    RunArgument,
    VerboseOption,
    open_run,
    out,
    print_json,
    slo_objectives,
    slo_option,
    working,
)
from sojourn.commands.summary import diagnose_run, next_steps, print_diagnosis

if TYPE_CHECKING:
    from sojourn.metrics.run.directory import RunDirectory


def diagnose(
    run: RunArgument,
    against: Annotated[
        Path | None,
        typer.Option(help="a second run: explains why a good benchmark feels slow, or why more GPUs did not help"),
    ] = None,
    symptom: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="start from a complaint: high_ttft, or words such as 'my first token is slow'; prints "
            "the way from it over lifecycles and objects to the measurement to make next",
        ),
    ] = None,
    slo: Annotated[
        str | None,
        slo_option(
            "objectives in ms, in place of those of the run; writes no diagnosis.json. A run without any takes a "
            "request as late beyond twice its own work"
        ),
    ] = None,
    verbose: VerboseOption = False,
    thorough: Annotated[
        bool, typer.Option("--thorough", help="take as long as it needs: all replays, and the machine's normal speed")
    ] = False,
    json: Annotated[
        bool, typer.Option("--json", help="print the diagnosis as JSON instead of the report; with --symptom, the tree")
    ] = False,
) -> None:  # fmt: skip
    """Say what a run suffers from, which lifecycle it comes from, and which experiment would prove it."""
    objectives = slo_objectives(slo)
    opened = open_run(run, objectives)
    other = open_run(against, objectives) if against else None
    if symptom is not None:
        _start_from(symptom, opened, other, json)
        return
    with working(f"diagnosing {opened.name}"):
        diagnosis = diagnose_run(opened, other, thorough=thorough)
    if json:
        print_json(diagnosis)
    else:
        options = [*(["--against", str(against)] if against else []), *(["--slo", slo] if slo else [])]
        print_diagnosis(diagnosis, opened, verbose, next_steps(opened, diagnosis), options)


def _start_from(symptom: str, run: "RunDirectory", against: "RunDirectory | None", as_json: bool) -> None:
    from sojourn.diagnosis.evidence import read_evidence
    from sojourn.diagnosis.expectation import with_expectation
    from sojourn.diagnosis.symptom_tree.complaints import find_complaint
    from sojourn.diagnosis.symptom_tree.tree import symptom_tree
    from sojourn.diagnosis.terminal.symptom_tree import render_tree

    complaint = find_complaint(symptom)  # before the run is read: a wrong name is told at once
    with working(f"diagnosing {run.name}"):
        diagnosis = diagnose_run(run, against)
        tree = symptom_tree(read_evidence(with_expectation(run)), diagnosis, complaint.symptom)
    if as_json:
        print_json(tree)
    else:
        out.print(render_tree(tree, diagnosis))
