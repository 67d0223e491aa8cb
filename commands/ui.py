"""`sojourn ui`: the web app."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import RUNS, need, open_run, out
from sojourn.metrics.errors import InputError


def ui(
    run: Annotated[Path | None, typer.Argument(help="the run to show first")] = None,
    runs: Annotated[Path, typer.Option(help="folder that holds the run directories")] = RUNS,
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on 127.0.0.1")] = 8501,
    read_only: Annotated[bool, typer.Option("--read-only", help="start no scenario from the app")] = False,
) -> None:
    """Open the web app: live servers, each run from overview to usage, two runs compared, scenarios started."""
    need("streamlit", "plotly")
    from sojourn.ui.launch import open_app

    if run is not None:
        if not (run / "run.json").exists() and any(run.glob("*/run.json")):
            raise InputError(f"{run} is a folder of runs, not one of them; give it as --runs {run}")
        run = open_run(run).path
    out.print(f"the app is at http://127.0.0.1:{port} (Ctrl-C ends it)")
    sys.exit(open_app(runs, run, port, read_only))
