"""`sojourn run`: our engine under a scenario, from start to diagnosis."""

from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import (
    ROUTER_HELP,
    PolicyOption,
    ProcessesOption,
    RouterEnvOption,
    RunDirOption,
    SeedOption,
    SensorsOption,
    SetOption,
    StopOption,
    VerboseOption,
    need,
    new_run,
    out,
    print_again,
    run_progress,
    running_sensors,
    sensors_of,
)
from sojourn.commands.load_options import load_options, print_load, stated_scenario
from sojourn.commands.prove_run import claim_of, is_proved, print_claim
from sojourn.commands.summary import REFERENCE_SECONDS, summarise
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.loadgen.scenario.options import LoadOptions


@load_options
def run(
    context: typer.Context,
    scenario: Annotated[
        str | None, typer.Argument(metavar="[SCENARIO]", help="name of a bundled scenario, or a scenario file")
    ] = None,
    set_: SetOption = None,
    output: RunDirOption = None,
    seed: SeedOption = None,
    processes: ProcessesOption = 1,
    stop_when_resolved: StopOption = None,
    replicas: Annotated[
        int | None, typer.Option(min=1, max=64, help="servers behind a router; by default those of the scenario, or 1")
    ] = None,
    router: Annotated[str | None, typer.Option(help=ROUTER_HELP)] = None,
    policy: PolicyOption = None,
    router_env: RouterEnvOption = None,
    sensors: SensorsOption = None,
    verbose: VerboseOption = False,
    prove: Annotated[
        bool, typer.Option("--prove", help="then repeat the load with the fix, and verify the prediction")
    ] = False,
    *,
    asked: "LoadOptions",
) -> None:
    """Start the engine, send a load to it, stop it, and diagnose the run. Several servers are one run.

    The load is a scenario, or what the options say. The scenario `demo` is a minute of a real trace on the bundled
    model, with a batch cap that is too small. With --prove it ends with 1 where the prediction missed.
    """
    if scenario is None and not asked.states_a_load:
        raise InputError(
            "nothing says what to send; name a scenario, such as `sojourn run demo`, or give --rate, --duration or "
            "--requests"
        )
    need("engine", "loadgen")
    from sojourn.engine.options import assignments, check_settings
    from sojourn.loadgen.run.experiment import run_scenario
    from sojourn.loadgen.scenario.scenario import with_fleet

    loaded = with_fleet(stated_scenario(scenario, asked, {"model": "tiny-model"}), replicas, router, policy)
    overrides = assignments(set_ or [], "--set")
    check_settings(loaded.engine, overrides)
    for own in loaded.fleet.servers.values() if loaded.fleet else ():
        check_settings(loaded.engine, overrides, own)
    run_dir, feed = output or new_run(loaded.name), sensors_of(sensors)
    print_load(loaded, seed)
    with running_sensors(feed), run_progress(run_dir) as progress:
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
            reference_s=REFERENCE_SECONDS,
            sensors=feed,
        )
    code, claim = summarise(done, verbose), claim_of(done.path)
    if prove or claim is not None:
        print_claim(claim)
    if not prove and claim is not None:
        print_again(context, "prove it", "--prove", note="   (this run, then the same load with the fix)")
    if prove and claim is not None and code in (Ended.DONE, Ended.NOT_VALID) and not is_proved(done, claim):
        code = Ended.FAILED
    raise typer.Exit(code)
