"""`sojourn explain`: where the time of one request went."""

from typing import Annotated

import typer

from commands.cli import RunArgument, open_run, out


def explain(
    run: RunArgument,
    request_id: Annotated[str, typer.Argument(help="ID of a request, as the run's tables and pages show it")],
    token: Annotated[
        int | None, typer.Option(min=0, help="explain the time before this output token in full; 0 is the first")
    ] = None,
) -> None:
    """Show where the time of one request went: its waits, the requests that delayed it, and its slowest tokens."""
    from metrics.diagnosis.explain_request import explain as explanation

    out.print(explanation(open_run(run), request_id, token))
