"""`sojourn load`: a scenario against a server that is already running."""

from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import (
    ProcessesOption,
    RunDirOption,
    ScenarioArgument,
    SeedOption,
    StopOption,
    need,
    new_run,
    run_progress,
)
from sojourn.commands.export import VLLM_FILE, export
from sojourn.commands.summary import print_replay, summarise


def load(
    scenario: ScenarioArgument,
    base_url: Annotated[
        str,
        typer.Option(
            help="any OpenAI-compatible server, such as http://127.0.0.1:8000; the environment variable "
            "SOJOURN_API_KEY has its key"
        ),
    ],
    model: Annotated[str | None, typer.Option(help="model to request; by default the server's first one")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="tokenizer.json, its folder, `tiny-model`, or `server` (its POST /tokenize): makes prompt lengths "
            "exact; without it they are counted in words"
        ),
    ] = None,
    server_run: Annotated[
        list[Path] | None,
        typer.Option(
            help="run directory of a Sojourn server on this host (serve --run-dir), or folder of a probe in "
            "another server; causes need its records; "
            "repeatable for the servers behind a router"
        ),
    ] = None,
    run_dir: RunDirOption = None,
    seed: SeedOption = None,
    processes: ProcessesOption = 1,
    stop_when_resolved: StopOption = None,
    save_result: Annotated[
        bool, typer.Option("--save-result", help=f"also write {VLLM_FILE}, the result file of vllm bench serve")
    ] = False,
) -> None:
    """Replay a scenario against a running server and diagnose the run. Causes need the server's records too."""
    need("loadgen")
    from sojourn.engine.options import check_settings
    from sojourn.loadgen.run.experiment import load_url
    from sojourn.loadgen.scenario.scenario import load_scenario

    loaded = load_scenario(scenario)
    check_settings(loaded.engine)
    run_dir = run_dir or new_run(loaded.name)
    print_replay(loaded, seed)
    with run_progress(run_dir) as progress:
        done = load_url(
            loaded, base_url, run_dir, model=model, tokenizer=tokenizer, seed=seed,
            server_runs=server_run or (), processes=processes, progress=progress,
            stop_when_resolved=stop_when_resolved,
        )  # fmt: skip
    code = summarise(done)
    if save_result:
        export(done.path)
    raise typer.Exit(code)
