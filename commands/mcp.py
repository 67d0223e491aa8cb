"""`sojourn mcp`: the runs of a folder for language models, by the Model Context Protocol."""

from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import RUNS, need
from sojourn.metrics.errors import InputError


def mcp(
    folder: Annotated[Path, typer.Option("--runs", help="folder of runs; nothing outside it can be read")] = RUNS,
    watch: Annotated[
        list[str] | None, typer.Option(help="address of a live server that the tools may watch; repeatable")
    ] = None,
) -> None:
    """Answer questions of an agent about the runs in a folder: a Model Context Protocol server on stdin and stdout.

    Its tools only read. An agent's configuration starts it: command `sojourn`, arguments `mcp --runs FOLDER`.
    """
    need("mcp")
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; give the folder that holds run directories, such as runs")
    from sojourn.scripting.mcp_server import build_server

    build_server(folder, watch or ()).run("stdio")
