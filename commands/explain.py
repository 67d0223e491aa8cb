"""`sojourn explain`: where the time of one request went."""

from typing import Annotated

import typer

from commands.cli import RunArgument, open_run, out, print_json, working


def explain(
    run: RunArgument,
    request_id: Annotated[str, typer.Argument(help="ID of a request, as the run's tables and pages show it")],
    token: Annotated[
        int | None, typer.Option(min=0, help="explain the time before this output token in full; 0 is the first")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the explanation as JSON")] = False,
) -> None:
    """Show where the time of one request went: its waits, the requests that delayed it, and its slowest tokens."""
    from metrics.diagnosis.explain_request import render
    from metrics.diagnosis.explanation import explanation_of

    opened = open_run(run)
    with working(f"reading {opened.name}"):
        found = explanation_of(opened, request_id, token)
    if json:
        print_json(found)
    else:
        out.print(render(found, alone=token is not None))
