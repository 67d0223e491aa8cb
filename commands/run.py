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
    again,
    need,
    new_run,
    out,
    run_progress,
)
from sojourn.commands.prove_run import claim_of, is_proved, print_claim
from sojourn.commands.summary import print_replay, summarise
from sojourn.loadgen.exit_code import NOT_VALID

MISSED = 1


def run(
    context: typer.Context,
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
    prove: Annotated[
        bool, typer.Option("--prove", help="then repeat the load with the fix, and verify the prediction")
    ] = False,
) -> None:
    """Start the engine, replay a scenario against it, stop it, and diagnose the run. Several servers are one run.

    The scenario `demo` is a minute of a real trace on the bundled model, with a batch cap that is too small. With
    --prove it ends with 1 where the prediction missed.
    """
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
    code, claim = summarise(done), claim_of(done.path)
    if prove or claim is not None:
        print_claim(claim)
    if not prove and claim is not None:
        out.print(f"prove it       {again(context, '--run-dir')} --prove   (this run, then the same load with the fix)",
                  markup=False, soft_wrap=True)  # fmt: skip
    if prove and claim is not None and code in (0, NOT_VALID) and not is_proved(done, claim):
        code = MISSED
    raise typer.Exit(code)
