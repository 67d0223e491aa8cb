"""`sojourn join`: the records of a client and of a server on another host, as one run."""

from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import open_run, out
from sojourn.commands.summary import summarise


def join(
    client_run: Annotated[Path, typer.Argument(help="run directory of the client (sojourn load)")],
    server_run: Annotated[
        Path, typer.Argument(help="run directory of the server (sojourn serve --run-dir), copied to this host")
    ],
) -> None:
    """Join the records of a client and a server on two hosts into the client's run, and show how far their clocks
    agree."""
    from sojourn.metrics.run.join import join_runs, uncertainty_sentence

    client = open_run(client_run)
    joined = join_runs(client, open_run(server_run))
    out.print(f"{joined.matched} of {joined.of} requests are joined in {client.path}")
    out.print(uncertainty_sentence(client.meta()) or "both ran on one host and share its clock")
    summarise(client)
