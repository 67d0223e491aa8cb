"""`sojourn run`: our engine under a scenario, from start to diagnosis."""

from typing import Annotated

import typer

from commands.cli import ProcessesOption, RunDirOption, ScenarioArgument, SeedOption, need, new_run, run_progress
from commands.summary import summarise


def run(
    scenario: ScenarioArgument,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override an engine setting; repeatable"),
    ] = None,
    run_dir: RunDirOption = None,
    seed: SeedOption = None,
    processes: ProcessesOption = 1,
) -> None:
    """Start the engine, replay a scenario against it, stop it, and diagnose the run."""
    need("engine")
    need("loadgen")
    from engine.options import assignments, check_settings
    from loadgen.run.experiment import run_scenario
    from loadgen.scenario.scenario import load_scenario

    loaded = load_scenario(scenario)
    overrides = assignments(set_ or [], "--set")
    check_settings(loaded.engine, overrides)
    run_dir = run_dir or new_run(loaded.name)
    with run_progress(run_dir) as progress:
        done = run_scenario(
            loaded, run_dir, engine_overrides=overrides, seed=seed, processes=processes, progress=progress
        )
    raise typer.Exit(summarise(done))
