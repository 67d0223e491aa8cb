"""`sojourn run`: our engine under a scenario, from start to diagnosis."""

from typing import Annotated

import typer

from sojourn.commands.cli import (
    ROUTER_HELP,
    PolicyOption,
    ProcessesOption,
    RouterEnvOption,
    RunDirOption,
    ScenarioArgument,
    SeedOption,
    StopOption,
    need,
    new_run,
    out,
    run_progress,
)
from sojourn.commands.summary import print_replay, summarise


def run(
    scenario: ScenarioArgument,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override an engine setting; repeatable"),
    ] = None,
    run_dir: RunDirOption = None,
    seed: SeedOption = None,
    processes: ProcessesOption = 1,
    stop_when_resolved: StopOption = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=64, help="servers behind a router; by default those of the scenario, or 1")
    ] = None,
    router: Annotated[str | None, typer.Option(help=ROUTER_HELP)] = None,
    policy: PolicyOption = None,
    router_env: RouterEnvOption = None,
) -> None:
    """Start the engine, replay a scenario against it, stop it, and diagnose the run. Several servers are one run."""
    need("engine")
    need("loadgen")
    from sojourn.engine.options import assignments, check_settings
    from sojourn.loadgen.run.experiment import run_scenario
    from sojourn.loadgen.scenario.scenario import load_scenario, with_fleet

    loaded = with_fleet(load_scenario(scenario), replicas, router, policy)
    overrides = assignments(set_ or [], "--set")
    check_settings(loaded.engine, overrides)
    for own in loaded.fleet.servers.values() if loaded.fleet else ():
        check_settings(loaded.engine, overrides, own)
    run_dir = run_dir or new_run(loaded.name)
    print_replay(loaded, seed)
    with run_progress(run_dir) as progress:
        done = run_scenario(
            loaded,
            run_dir,
            engine_overrides=overrides,
            seed=seed,
            processes=processes,
            progress=progress,
            router_env=router_env,
            stop_when_resolved=stop_when_resolved,
            is_watched=out.is_terminal,
        )
    raise typer.Exit(summarise(done))
