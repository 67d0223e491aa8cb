"""`sojourn trace`: a run as a trace for Perfetto."""

from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import RunArgument, open_run, out, working, writing
from sojourn.metrics.errors import InputError


def trace(
    run: RunArgument,
    from_: Annotated[
        float | None,
        typer.Option("--from", min=0, help="seconds since the first request or step; by default the whole run"),
    ] = None,
    to: Annotated[float | None, typer.Option("--to", min=0, help="seconds since the first request or step")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; by default trace.json.gz in the run")
    ] = None,
) -> None:
    """Write a run's requests, steps and counters as a trace for ui.perfetto.dev or chrome://tracing."""
    from sojourn.interop.exported.perfetto import run_rows, write_trace
    from sojourn.metrics.run.fleet import refuse_fleet

    if from_ is not None and to is not None and to <= from_:
        raise InputError(f"--to {to:g} is not after --from {from_:g}; give seconds since the first request or step")
    opened = open_run(run)
    refuse_fleet(opened, "a trace")
    path = output or opened.path / "trace.json.gz"
    with writing(path), working(f"writing {path.name}"):
        written = write_trace(path, run_rows(opened, from_, to))
    dropped = f"; {written.dropped:,} more did not fit, choose a window with --from and --to" if written.dropped else ""
    out.print(f"wrote {path}: {written.events:,} events{dropped}; open it at https://ui.perfetto.dev")
