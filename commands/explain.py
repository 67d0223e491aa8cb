"""`sojourn explain`: where the time of one request went."""

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sojourn.commands.cli import RunArgument, open_run, out, print_json, working
from sojourn.metrics.errors import InputError, RunDataError

if TYPE_CHECKING:
    from sojourn.metrics.run.directory import RunDirectory

Slowest = Literal["ttft", "tpot", "e2e"]


def explain(
    run: RunArgument,
    request_id: Annotated[
        str | None, typer.Argument(help="ID of a request, as the run's tables and pages show it")
    ] = None,
    slowest: Annotated[
        Slowest | None, typer.Option(help="in place of an ID: the served request with the longest of these latencies")
    ] = None,
    token: Annotated[
        int | None, typer.Option(min=0, help="explain the time before this output token in full; 0 is the first")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print the explanation as JSON")] = False,
) -> None:
    """Show where the time of one request went: its waits, the requests that delayed it, and its slowest tokens."""
    from sojourn.diagnosis.explain_request import render
    from sojourn.diagnosis.explanation import explanation_of

    if (request_id is None) == (slowest is None):
        raise InputError("name a request by its ID, or by --slowest ttft, tpot or e2e")
    opened = open_run(run)
    if request_id is None:
        request_id = _slowest(opened, f"{slowest}_ms")
    with working(f"reading {opened.name}"):
        found = explanation_of(opened, request_id, token)
    if json:
        print_json(found)
    else:
        out.print(render(found, alone=token is not None))


def _slowest(run: "RunDirectory", latency: str) -> str:
    """The ID of the measured request that took longest. Raises RunDataError where no request has this latency."""
    from sojourn.metrics.request.goodput import measured
    from sojourn.metrics.run.server_alone import meta_of, requests_of

    rows = measured(requests_of(run, run.meta()), meta_of(run))
    known = rows[(rows.status == "ok") & rows[latency].notna()]
    if known.empty:
        raise RunDataError(f"{run.path} has no served request with a {latency}")
    return str(known.request_id[known[latency].astype("float64").idxmax()])
