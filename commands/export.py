"""`sojourn export`: a run in the format of another tool."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sojourn.commands.cli import RunArgument, open_run, out, writing
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.metrics.run.directory import RunDirectory

VLLM_FILE = "vllm_result.json"
FILES = {
    "vllm": VLLM_FILE, "aiperf": "profile_export.jsonl", "inference-perf": "per_request_lifecycle_metrics.json",
    "guidellm": "benchmarks.json",
}  # fmt: skip
WRITTEN = {
    "vllm": "the keys of vllm bench serve 0.33, and ours",
    "aiperf": "AIPerf's records of requests, without what a run does not have",
    "inference-perf": "inference-perf's requests, without texts",
    "guidellm": "GuideLLM's report of one benchmark, without texts",
}


def export(
    run: RunArgument,
    format_: Annotated[
        Literal["vllm", "aiperf", "inference-perf", "guidellm"],
        typer.Option(
            "--format",
            help="vllm: the result file of `vllm bench serve`, with more keys; aiperf: profile_export.jsonl; "
            "inference-perf: per_request_lifecycle_metrics.json; guidellm: benchmarks.json, which "
            "`guidellm export` reads",
        ),
    ] = "vllm",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="file to write; by default the tool's own name, in the run")
    ] = None,
    detailed: Annotated[
        bool | None, typer.Option(help="vllm: include arrays with one entry per request, as by default")
    ] = None,
) -> None:
    """Write a run's results in the format of another benchmark: its keys, its units."""
    if detailed is not None and format_ != "vllm":
        raise InputError(f"--detailed is of --format vllm; {format_} always has one entry a request")
    from sojourn.metrics.run.directory import kept_share

    opened = open_run(run)
    if (share := kept_share(opened.meta())) < 1:
        raise InputError(
            f"{opened.path} is a sample: its tool kept {share:.1%} of the requests, and {format_}'s format has no "
            "word for that; give the tool's own file on"
        )
    path = output or opened.path / FILES[format_]
    text = _text(opened, format_, detailed is not False)
    with writing(path):
        path.write_text(text, encoding="utf-8")
    out.print(f"wrote {path}: {WRITTEN[format_]}")


def _text(run: "RunDirectory", format_: str, detailed: bool) -> str:
    from sojourn.interop.exported.aiperf_records import aiperf_records
    from sojourn.interop.exported.inference_perf_requests import inference_perf_requests
    from sojourn.metrics.request.goodput import measured

    if format_ == "vllm":
        return json.dumps(vllm_document(run, detailed=detailed), allow_nan=False) + "\n"
    meta = run.meta()
    frame = measured(run.requests(), meta)
    if format_ == "aiperf":
        return "".join(json.dumps(line, allow_nan=False) + "\n" for line in aiperf_records(frame, meta))
    if format_ == "guidellm":
        from sojourn.interop.exported.guidellm_report import guidellm_report

        return json.dumps(guidellm_report(frame, meta, run.path.name), allow_nan=False) + "\n"
    return json.dumps(inference_perf_requests(frame), allow_nan=False) + "\n"


def vllm_document(run: "RunDirectory", **choices: Any) -> dict[str, Any]:
    """The result file of a run; `choices` as `interop.exported.vllm_result.vllm_result` takes them."""
    from sojourn.interop.exported.vllm_result import vllm_result
    from sojourn.metrics.request.goodput import measured

    meta = run.meta()
    return vllm_result(measured(run.requests(), meta), meta, **choices)
