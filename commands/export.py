"""`sojourn export`: a run in the format of another tool, as a trace or as a page."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sojourn.commands.cli import RunArgument, open_run, out, output_option, working, writing
from sojourn.commands.report import report
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.metrics.run.directory import RunDirectory

VLLM_FILE = "vllm_result.json"
PER_GPU = ("inferencex", "llm-d")
FILES = {
    "vllm": VLLM_FILE, "aiperf": "profile_export.jsonl", "inference-perf": "per_request_lifecycle_metrics.json",
    "guidellm": "benchmarks.json", "inferencex": "agg_result.json", "llm-d": "benchmark_report_v0.2.1.yaml",
}  # fmt: skip
WRITTEN = {
    "vllm": "the keys of vllm bench serve 0.33, and ours",
    "aiperf": "AIPerf's records of requests, without what a run does not have",
    "inference-perf": "inference-perf's requests, without texts",
    "guidellm": "GuideLLM's report of one benchmark, without texts",
    "inferencex": "a row of InferenceX: throughput per GPU, times in seconds, interactivity",
    "llm-d": "llm-d's Benchmark Report 0.2.1",
}


def export(
    run: RunArgument,
    to: Annotated[
        Literal["vllm", "aiperf", "inference-perf", "guidellm", "inferencex", "llm-d", "perfetto", "html"],
        typer.Option(
            help="vllm: the result file of `vllm bench serve`, with more keys; aiperf: profile_export.jsonl; "
            "inference-perf: per_request_lifecycle_metrics.json; guidellm: benchmarks.json, which "
            "`guidellm export` reads; inferencex: a row of a closed loop, by GPU; llm-d: its Benchmark Report; "
            "perfetto: a trace for ui.perfetto.dev or chrome://tracing; html: as `sojourn report`",
        ),
    ] = "vllm",
    output: Annotated[Path | None, output_option("file to write; by default the tool's own name, in the run")] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="inferencex, llm-d: GPUs of the server, where the run does not know their number"),
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="inferencex, llm-d: name of the GPUs, such as h100")] = None,
    detailed: Annotated[
        bool | None, typer.Option(help="vllm: include arrays with one entry per request, as by default")
    ] = None,
    from_: Annotated[
        float | None,
        typer.Option(
            "--from", min=0, help="perfetto: seconds since the first request or step; by default the whole run"
        ),
    ] = None,
    until: Annotated[
        float | None, typer.Option(min=0, help="perfetto: seconds since the first request or step")
    ] = None,
) -> None:
    """Write a run as a file of another tool: a benchmark's results with its keys and units, a trace, or a page."""
    if detailed is not None and to != "vllm":
        raise InputError(f"--detailed is of --to vllm; leave it out for {to}")
    if to not in PER_GPU and (gpus is not None or hardware is not None):
        raise InputError(f"--gpus and --hardware are of --to {' and '.join(PER_GPU)}; leave them out for {to}")
    if to != "perfetto" and (from_ is not None or until is not None):
        raise InputError(f"--from and --until are of --to perfetto; leave them out for {to}")
    if to == "perfetto":
        _write_trace(run, output, from_, until)
    elif to == "html":
        report(run, output)
    else:
        _write_results(run, to, output, detailed is not False, gpus, hardware)


def _write_trace(run: Path, output: Path | None, from_: float | None, until: float | None) -> None:
    """Requests, steps and counters."""
    from sojourn.interop.exported.perfetto import run_rows, write_trace
    from sojourn.metrics.run.fleet import refuse_fleet

    if from_ is not None and until is not None and until <= from_:
        raise InputError(
            f"--until {until:g} is not after --from {from_:g}; give seconds since the first request or step"
        )
    opened = open_run(run)
    refuse_fleet(opened, "a trace")
    path = output or opened.path / "trace.json.gz"
    with writing(path), working(f"writing {path.name}"):
        written = write_trace(path, run_rows(opened, from_, until))
    dropped = f"; {written.dropped:,} more did not fit, choose a window with --from and --until"
    out.print(
        f"wrote {path}: {written.events:,} events{dropped if written.dropped else ''}; open it at "
        "https://ui.perfetto.dev"
    )


def _write_results(
    run: Path, to: str, output: Path | None, detailed: bool, gpus: int | None, hardware: str | None
) -> None:
    from sojourn.metrics.run.directory import kept_share

    opened = open_run(run)
    if (share := kept_share(opened.meta())) < 1:
        raise InputError(
            f"{opened.path} is a sample: its tool kept {share:.1%} of the requests, and {to}'s format has no word for "
            "that; give the tool's own file on"
        )
    path = output or opened.path / FILES[to]
    text = _of_gpus(opened, to, gpus, hardware) if to in PER_GPU else _text(opened, to, detailed)
    with writing(path):
        path.write_text(text, encoding="utf-8")
    out.print(f"wrote {path}: {WRITTEN[to]}")


def _of_gpus(run: "RunDirectory", format_: str, gpus: int | None, hardware: str | None) -> str:
    from sojourn.interop.exported.inferencex_row import inferencex_row
    from sojourn.interop.exported.llmd_report import llmd_report
    from sojourn.metrics.request.goodput import measured

    meta = run.meta()
    if format_ == "inferencex":
        document = inferencex_row(vllm_document(run, detailed=False), meta, gpus=gpus, hardware=hardware)
    else:
        document = llmd_report(measured(run.requests(), meta), meta, run.path.name, gpus=gpus, hardware=hardware)
    return json.dumps(document, allow_nan=False, indent=2) + "\n"


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
