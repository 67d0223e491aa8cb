"""The options of `sojourn dev bench`, and what it does with a report: shows it, writes it."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.engines.offline import OfflineOptions, bench_offline
from bench.engines.online import OnlineOptions, bench_online
from bench.kernels.run import KERNELS, bench_kernels
from bench.report import tables
from bench.results import BenchError, Report, write_report
from bench.shapes import SHAPES
from bench.variants import named_variants
from bench.workloads import WORKLOADS
from sojourn.commands.help_page import HelpPage
from sojourn.engine.options import assignments
from sojourn.metrics.machine.host import company

PEERS = {"offline": ("transformers",), "online": ("vllm", "llama-server")}

app = HelpPage(
    no_args_is_help=True,
    add_completion=False,
    help="Measure the engine: throughput, latency and kernels, beside peers and the measured limits.",
)
out = Console()

Model = Annotated[
    str, typer.Argument(help=f"a checkpoint, a config.json, or a shape for random weights: {', '.join(SHAPES)}")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="a setting of the engine; repeatable")
]
Variants = Annotated[
    list[str] | None,
    typer.Option("--variant", metavar="NAME:KEY=VALUE,...", help="also with these settings, in turns; repeatable"),
]
Repeats = Annotated[int, typer.Option(min=1, help="repeats of each engine, in turns; the report gives medians")]
OneAtATime = Annotated[bool, typer.Option("--one-at-a-time", help="start each engine only for its turn")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="write everything that was measured to this file")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="write the tables to this file")]


@app.command()
def offline(
    model: Model,
    workload: Annotated[str, typer.Option(help=f"one of {', '.join(WORKLOADS)}")] = "cpu",
    settings: Settings = None,
    variant: Variants = None,
    ablate: Annotated[bool, typer.Option("--ablate", help="also without each optimisation, one by one")] = False,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="transformers=PYTHON: its continuous batching")
    ] = None,
    repeats: Repeats = 3,
    one_at_a_time: OneAtATime = False,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
) -> None:
    """Throughput without a server: all requests at once, in the engine's own process."""
    options = OfflineOptions(
        model, workload, assignments(settings or [], "--set"), named_variants(variant or []), ablate,
        repeats=repeats, one_at_a_time=one_at_a_time, **_peers("offline", peer or []),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="sojourn-bench-") as folder:
        _measure(lambda save: bench_offline(options, Path(folder), _show, save), json, markdown)


@app.command()
def online(
    model: Model,
    concurrency: Annotated[
        list[int] | None, typer.Option("--concurrency", "-c", min=1, help="repeatable; 1, 8 and 32 by default")
    ] = None,
    input_len: Annotated[int, typer.Option(min=1, max=960, help="tokens of each prompt")] = 128,
    output_len: Annotated[int, typer.Option(min=2, max=960, help="tokens of each answer")] = 64,
    requests_per_stream: Annotated[int, typer.Option(min=1, help="requests that each stream sends")] = 3,
    max_requests: Annotated[
        int | None, typer.Option(min=1, help="most requests of one concurrency, but one a stream")
    ] = None,
    burst: Annotated[bool, typer.Option("--burst", help="also 64 short requests at once")] = False,
    settings: Settings = None,
    variant: Variants = None,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME=PATH", help="vllm=PYTHON or llama-server=BINARY; repeatable")
    ] = None,
    peer_model: Annotated[
        list[str] | None, typer.Option(metavar="FILE.gguf", help="llama-server's model; each is an engine; repeatable")
    ] = None,
    repeats: Repeats = 3,
    one_at_a_time: OneAtATime = False,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
) -> None:
    """Latency and throughput over HTTP, with a fixed number of requests at a time."""
    options = OnlineOptions(
        model, concurrency or [1, 8, 32], input_len, output_len, requests_per_stream, max_requests, burst,
        assignments(settings or [], "--set"), named_variants(variant or []), gguf=peer_model or [], repeats=repeats,
        one_at_a_time=one_at_a_time, **_peers("online", peer or []),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="sojourn-bench-") as folder:
        _measure(lambda save: bench_online(options, Path(folder), _show, save), json, markdown)


@app.command()
def kernels(
    names: Annotated[list[str] | None, typer.Argument(help=f"of {', '.join(KERNELS)}; by default what fits")] = None,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
) -> None:
    """Single kernels, beside the limits that bound them."""
    _measure(lambda save: bench_kernels(names or [], _show, save), json, markdown)


def _peers(kind: str, pairs: list[str]) -> dict[str, str]:
    """NAME=PATH pairs, of peers that this benchmark can run. Raises BenchError."""
    found = {}
    for pair in pairs:
        name, equals, path = pair.partition("=")
        if not equals or name not in PEERS[kind]:
            raise BenchError(f"--peer {pair!r} is not NAME=PATH with a peer of bench {kind}: {', '.join(PEERS[kind])}")
        if not Path(path).expanduser().is_file():
            raise BenchError(f"--peer {name}={path}: there is no such file; give its Python, or its binary")
        if name.replace("-", "_") in found:
            raise BenchError(f"--peer {name} is given twice; one run has one of each")
        found[name.replace("-", "_")] = str(Path(path).expanduser())
    return found


def _measure(run: Callable[[Callable[[Report], None]], Report], json: Path | None, markdown: Path | None) -> None:
    """Runs a benchmark, then shows and writes its report. One that is cut short shows what there is by then."""
    for option, path in (("--json", json), ("--markdown", markdown)):
        _check_writable(option, path)
    _warn_of_company()
    latest: list[Report] = []

    def save(report: Report) -> None:
        latest[:] = [report]
        if json is not None:
            write_report(report, json)

    try:
        report = run(save)
    except KeyboardInterrupt:
        if latest:
            latest[0].notes.append("Cut short: the last repeats are missing.")
            _finish(latest[0], json, markdown)
        raise
    _finish(report, json, markdown)


def _check_writable(option: str, path: Path | None) -> None:
    """Raises BenchError before anything is measured."""
    if path is None:
        return
    if path.is_dir():
        raise BenchError(f"{option} {path} is a folder; give a file")
    if not path.absolute().parent.is_dir():
        raise BenchError(f"{option} {path}: there is no folder {path.absolute().parent}; make it, or give another file")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise BenchError(f"{option} {path} cannot be written: permission denied; give another file")


def _warn_of_company() -> None:
    if busy := company():
        _show(f"{busy}: figures will be low; compare ratios only")


def _show(line: str) -> None:
    out.print(line, highlight=False, markup=False)


def _finish(report: Report, json: Path | None, markdown_file: Path | None) -> None:
    out.print(tables.render(report, out.width), highlight=False, markup=False)
    if json is not None:
        write_report(report, json)
    if markdown_file is not None:
        try:
            markdown_file.write_text(tables.markdown(report), encoding="utf-8")
        except OSError as error:
            raise BenchError(f"--markdown {markdown_file} cannot be written: {error.strerror}") from None
