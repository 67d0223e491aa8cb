"""`sojourn export`: a run in the words of another tool."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from commands.frame import RunArgument, open_run, out
from metrics.errors import SojournError
from metrics.run.directory import RunDirectory

VLLM_FILE = "vllm_result.json"


def export(
    run: RunArgument,
    format_: Annotated[
        Literal["vllm"], typer.Option("--format", help="vllm: the result file of `vllm bench serve`, and more keys")
    ] = "vllm",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"the file to write; by default {VLLM_FILE} in the run")
    ] = None,
    detailed: Annotated[bool, typer.Option(help="with arrays that have an entry for each request")] = True,
) -> None:
    """Write a run's results as another benchmark would have: its keys, its units."""
    opened = open_run(run)
    path = output or opened.path / VLLM_FILE
    try:
        path.write_text(json.dumps(vllm_document(opened, detailed=detailed), allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise SojournError(f"{path} cannot be written: {error.strerror}; choose another with --output") from None
    out.print(f"wrote {path}: the keys of vllm bench serve 0.33, and ours", highlight=False)


def vllm_document(run: RunDirectory, **choices) -> dict:
    """The result file of a run; `choices` as `metrics.export.vllm_result.vllm_result` takes them."""
    from metrics.export.vllm_result import vllm_result
    from metrics.request.goodput import measured

    meta = run.meta()
    return vllm_result(measured(run.requests(), meta), meta, **choices)
