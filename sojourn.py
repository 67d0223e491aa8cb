"""The command line: parses, calls one function of a package, prints."""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from commands.bench_serve import bench_serve
from commands.calibrate import calibrate
from commands.capacity import capacity
from commands.compare import compare
from commands.engine_settings import check_engine_block, engine_config
from commands.export import VLLM_FILE, export
from commands.frame import (
    RUNS,
    ProcessesOption,
    RunArgument,
    RunDirOption,
    ScenarioArgument,
    SeedOption,
    need,
    new_run,
    open_run,
    out,
    print_nowhere,
    run_told_when_stopped,
)  # fmt: skip
from commands.sweep import sweep
from commands.telling import diagnose_run, print_diagnosis, program, tell
from engine.options import assignments, engine_options
from engine.process import let_threads_sleep
from loadgen.exit_code import EXIT_CODES, NOT_VALID
from metrics.errors import InputError, SojournError

app = typer.Typer(
    name="sojourn",
    help="Where the time of a large language model server goes: serve a model, replay a scenario against it, and read "
    "which of four lifecycles (token, compute, memory, request) is the bottleneck, and what would prove it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command()
@engine_options
def serve(**settings: Any) -> None:
    """Serve a model: OpenAI-compatible API, Prometheus metrics at /metrics."""
    need("engine", "torch", "fastapi", "uvicorn", "zmq", "tokenizers", "minijinja", "safetensors")
    from engine.server.serve import serve as run_server

    run_server(engine_config(settings))


@app.command(epilog=EXIT_CODES)
def run(
    scenario: ScenarioArgument,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change a setting of the engine; repeatable")
    ] = None,
    run_dir: RunDirOption = None,
    seed: SeedOption = None,
    processes: ProcessesOption = 1,
) -> None:
    """Start the engine as a scenario says, replay the scenario, stop the engine, diagnose."""
    need("engine", "torch", "fastapi", "uvicorn", "zmq", "tokenizers", "minijinja", "safetensors")
    need("loadgen", "locust", "gevent", "httptools")
    from loadgen.run.experiment import run_scenario
    from loadgen.run.progress_bar import ProgressBar
    from loadgen.scenario.scenario import load_scenario

    loaded = load_scenario(scenario)
    overrides = assignments(set_ or [], "--set")
    check_engine_block(loaded, overrides)
    run_dir = run_dir or new_run(loaded.name)
    with run_told_when_stopped(run_dir), ProgressBar(out) as progress:
        done = run_scenario(
            loaded, run_dir, engine_overrides=overrides, seed=seed, processes=processes,
            progress=progress,
        )  # fmt: skip
    raise typer.Exit(tell(done))


@app.command(epilog=EXIT_CODES)
def load(
    scenario: ScenarioArgument,
    base_url: Annotated[str, typer.Option(help="any OpenAI-compatible server, such as http://127.0.0.1:8000")],
    model: Annotated[str | None, typer.Option(help="model to ask for; by default the server's first one")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tokenizer.json, its folder, `tiny-model`, or `server` (its POST /tokenize): exact prompt lengths "
            "instead of words"
        ),
    ] = None,
    server_run: Annotated[
        Path | None,
        typer.Option(help="the folder that our own server on this host records into (serve --run-dir): tells causes"),
    ] = None,
    run_dir: RunDirOption = None,
    seed: SeedOption = None,
    processes: ProcessesOption = 1,
    save_result: Annotated[
        bool, typer.Option("--save-result", help=f"write {VLLM_FILE} too: the result file of vllm bench serve")
    ] = False,
) -> None:
    """Replay a scenario against a server that is running already, diagnose. Causes need the server's records too."""
    need("loadgen", "locust", "gevent", "httptools")
    from loadgen.run.experiment import load_url
    from loadgen.run.progress_bar import ProgressBar
    from loadgen.scenario.scenario import load_scenario

    loaded = load_scenario(scenario)
    check_engine_block(loaded)
    run_dir = run_dir or new_run(loaded.name)
    with run_told_when_stopped(run_dir), ProgressBar(out) as progress:
        done = load_url(
            loaded, base_url, run_dir, model=model, tokenizer=tokenizer, seed=seed,
            server_run=server_run, processes=processes, progress=progress,
        )  # fmt: skip
    code = tell(done)
    if save_result:
        export(done.path)
    raise typer.Exit(code)


for verb in (sweep, capacity, compare, export):
    app.command()(verb)


@app.command()
def diagnose(
    run: RunArgument,
    against: Annotated[
        Path | None, typer.Option(help="a second run: explains a poor product behind a good benchmark, or idle devices")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="print diagnosis.json instead of the report")] = False,
) -> None:
    """Say what a run suffers from, which lifecycle it comes from, and what would prove it."""
    opened = open_run(run)
    diagnosis = diagnose_run(opened, open_run(against) if against else None)
    if json:
        print((opened.path / "diagnosis.json").read_text(encoding="utf-8"), end="")
    else:
        print_diagnosis(diagnosis)


@app.command()
def explain(
    run: RunArgument,
    request_id: Annotated[str, typer.Argument(help="a request of the run, as its tables and pages name it")],
    token: Annotated[
        int | None, typer.Option(min=0, help="explain the time before this output token in full; 0 is the first")
    ] = None,
) -> None:
    """Say where the time of one request went, what it waited for, through whom, and why its slow tokens were slow."""
    from metrics.diagnosis.explain_request import explain as explanation

    out.print(explanation(open_run(run), request_id, token))


@app.command()
def join(
    client_run: Annotated[Path, typer.Argument(help="the run directory that a client recorded (sojourn load)")],
    server_run: Annotated[
        Path, typer.Argument(help="what the server recorded of it (sojourn serve --run-dir), copied")
    ],
) -> None:
    """Join what client and server recorded on two hosts into the client's run, and tell how far their clocks agree."""
    from metrics.run.join import join_runs, uncertainty_sentence

    client = open_run(client_run)
    joined = join_runs(client, open_run(server_run))
    out.print(f"{joined.matched} of {joined.of} requests are joined in {client.path}", highlight=False)
    said = uncertainty_sentence(client.meta())
    out.print(said if said else "both ran on one host, whose clock they share", highlight=False)
    tell(client)


@app.command()
def report(
    run: RunArgument,
    output: Annotated[Path | None, typer.Option(help="the file to write; by default report.html in the run")] = None,
    against: Annotated[Path | None, typer.Option(help="a second run to compare with")] = None,
) -> None:
    """Write a run's diagnosis and figures as one self-contained HTML file."""
    need("ui", "plotly")
    from ui.html.run_report import write_report

    opened = open_run(run)
    diagnosis = diagnose_run(opened, open_run(against) if against else None)
    out.print(f"wrote {write_report(opened, diagnosis, output or opened.path / 'report.html')}", highlight=False)


@app.command()
def trace(
    run: RunArgument,
    from_: Annotated[
        float | None, typer.Option("--from", min=0, help="seconds since the first request or step; by default all")
    ] = None,
    to: Annotated[float | None, typer.Option("--to", min=0, help="seconds since the first request or step")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the file to write; by default trace.json.gz in the run")
    ] = None,
) -> None:
    """Write a run's requests, steps and counters as a trace for ui.perfetto.dev or chrome://tracing."""
    from metrics.export.perfetto import run_rows, write_trace

    if from_ is not None and to is not None and to <= from_:
        raise InputError(f"--to {to:g} is not after --from {from_:g}; give seconds since the first request or step")
    opened = open_run(run)
    path = output or opened.path / "trace.json.gz"
    try:
        written = write_trace(path, run_rows(opened, from_, to))
    except OSError as error:
        raise SojournError(f"{path} cannot be written: {error.strerror}; choose another with --output") from None
    dropped = f"; {written.dropped:,} more did not fit, choose a window with --from and --to" if written.dropped else ""
    out.print(f"wrote {path}: {written.events:,} events{dropped}; open it at https://ui.perfetto.dev", highlight=False)


@app.command()
def ui(
    run: Annotated[Path | None, typer.Argument(help="the run to show first")] = None,
    runs: Annotated[Path, typer.Option(help="folder of the run directories")] = RUNS,
    port: Annotated[int, typer.Option(min=1, max=65535, help="port on 127.0.0.1")] = 8501,
) -> None:
    """Open the app on the runs: overview, diagnosis, goodput, requests, steps, memory, compute."""
    need("ui", "streamlit", "plotly")
    from ui.launch import open_app

    if run is not None:
        if not (run / "run.json").exists() and any(run.glob("*/run.json")):
            raise InputError(f"{run} is a folder of runs, not one of them; give it as --runs {run}")
        run = open_run(run).path
    out.print(f"the app is at http://127.0.0.1:{port} (Ctrl-C ends it)", highlight=False)
    sys.exit(open_app(runs, run, port))


@app.command()
def dashboards(
    output: Annotated[Path, typer.Option(help="folder to write into")] = Path("dashboards/generated"),
) -> None:
    """Write the Grafana dashboards, the Prometheus rules and a compose file for both."""
    need("ui", "grafanalib")
    from dashboards.build import build_dashboards

    try:
        written = build_dashboards(output)
    except NotADirectoryError as error:
        raise InputError(str(error)) from None
    for path in written:
        out.print(f"wrote {path}", highlight=False)


@app.command(epilog=EXIT_CODES)
def demo() -> None:
    """The main job in one command: the bundled model under a minute of a real trace, diagnosed.

    A machine that is too busy for the load gives a run that is not valid, and says so: of a demo that is no failure.
    """
    try:
        run("demo")
    except typer.Exit as ended:
        if ended.exit_code != NOT_VALID:
            raise


app.command()(calibrate)


@app.command()
def calibrate_device(
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="auto takes CUDA where there is one")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; by default all cores")] = None,
    output: Annotated[Path | None, typer.Option("--out", help="file to write; by default where bench looks")] = None,
) -> None:
    """Measure what a device can do at most (bandwidth, matrix products by precision and rows), and keep it."""
    need("engine", "torch")
    let_threads_sleep(os.environ, sys.modules)  # before torch: beside a busy process, spinning is what one measures
    from engine.compute.device_ceilings import calibrate
    from metrics.compute.roofline import ceilings_table, store_ceilings
    from metrics.machine.host import company

    busy = company()
    ceilings = calibrate(device, threads)
    out.print(ceilings_table(ceilings))
    if busy:
        out.print(f"{busy}: these ceilings are too low; run it again on a quiet machine", highlight=False)
    out.print(f"kept in {store_ceilings(ceilings, output)}", highlight=False)


FOREIGN = {"allow_extra_args": True, "ignore_unknown_options": True}  # the verb reads its own words
app.command("bench-serve", add_help_option=False, context_settings=FOREIGN)(bench_serve)


@app.command(add_help_option=False, context_settings=FOREIGN)
def bench(context: typer.Context) -> None:
    """Measure the engine: throughput, latency and kernels, beside peers and the measured limits."""
    need("engine", "torch", "zmq", "tokenizers", "safetensors")
    if not (Path(__file__).parent / "bench" / "command.py").is_file():
        raise SojournError(
            "sojourn bench runs from Sojourn's source folder only; get it, and install with pip install -e ."
        )
    sys.path.insert(0, str(Path(__file__).parent))
    from bench.command import app as bench_app

    sys.exit(bench_app(args=context.args, prog_name=f"{program()} bench", standalone_mode=False) or 0)  # 130: Ctrl-C


def _interrupt(*_: object) -> None:
    """SIGTERM, and a closed terminal, end an experiment as Ctrl-C does: its processes stop, its records are kept."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point: every expected failure is a sentence on stderr and an exit code: 1 failure, 2 usage.

    How a load ended, `loadgen.exit_code` says.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        app()
    except SojournError as error:
        print(f"sojourn: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `--json | head`
            print_nowhere(sys.stdout)


if __name__ == "__main__":
    main()
