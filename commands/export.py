"""`sojourn export`: a run in the format of another tool."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from commands.cli import RunArgument, open_run, out, writing

if TYPE_CHECKING:
    from metrics.run.directory import RunDirectory

VLLM_FILE = "vllm_result.json"


def export(
    run: RunArgument,
    format_: Annotated[
        Literal["vllm"], typer.Option("--format", help="vllm: the result file of `vllm bench serve`, with more keys")
    ] = "vllm",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"file to write; by default {VLLM_FILE} in the run")
    ] = None,
    detailed: Annotated[bool, typer.Option(help="include arrays with one entry per request")] = True,
) -> None:
    """Write a run's results in the format of another benchmark: its keys, its units."""
    opened = open_run(run)
    path = output or opened.path / VLLM_FILE
    with writing(path):
        path.write_text(json.dumps(vllm_document(opened, detailed=detailed), allow_nan=False) + "\n", encoding="utf-8")
    out.print(f"wrote {path}: the keys of vllm bench serve 0.33, and ours")


def vllm_document(run: "RunDirectory", **choices: Any) -> dict[str, Any]:
    """The result file of a run; `choices` as `metrics.export.vllm_result.vllm_result` takes them."""
    from metrics.export.vllm_result import vllm_result
    from metrics.request.goodput import measured

    meta = run.meta()
    return vllm_result(measured(run.requests(), meta), meta, **choices)
