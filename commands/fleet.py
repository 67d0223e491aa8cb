"""`sojourn server fleet`: several servers behind a router that exists."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import ROUTER_HELP, PolicyOption, RouterEnvOption, need, new_run, out, output_option
from sojourn.commands.fleet_replay import replay
from sojourn.commands.help_page import HelpPage
from sojourn.metrics.errors import ExperimentError, InputError

if TYPE_CHECKING:
    from sojourn.loadgen.fleet.fleet import Fleet

fleet = HelpPage(help="Several servers of one model behind an existing router, on this machine.", no_args_is_help=True)


@fleet.callback()
def _verbs() -> None:
    """Several servers of one model behind an existing router, on this machine."""


fleet.command()(replay)


@fleet.command()
def up(
    count: Annotated[int, typer.Argument(min=1, max=64, help="servers")],
    router: Annotated[str, typer.Option(help=ROUTER_HELP)] = "vllm-router",
    model: Annotated[str, typer.Option(help="checkpoint of every server")] = "tiny-model",
    policy: PolicyOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="port of the router")] = 8000,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="an engine setting of every server; repeatable"),
    ] = None,
    router_env: RouterEnvOption = None,
    max_servers: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="with ray: add servers up to so many while requests wait or miss objectives"),
    ] = None,
    run_dir: Annotated[
        Path | None, output_option("folder for logs and the records of each server; by default a new one in runs/")
    ] = None,
) -> None:
    """Start COUNT servers and the router, and serve until Ctrl-C, which ends them all."""
    need("engine")
    from sojourn.engine.options import assignments, check_settings
    from sojourn.loadgen.fleet.fleet import check_fleet
    from sojourn.loadgen.fleet.fleet import fleet as running_fleet
    from sojourn.loadgen.fleet.routers import installed, known_router

    chosen = known_router(router, policy)
    if max_servers is not None and max_servers < count:
        raise InputError(f"--max-servers {max_servers} is below the {count} servers to start; raise it")
    settings = {"model": model} | assignments(set_ or [], "--set")
    check_fleet(chosen, settings, {}, policy=policy, most=max_servers)
    program = installed(chosen, router_env)
    check_settings({"model": model}, settings)
    folder = run_dir or new_run("fleet")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; choose another with --output")
    out.print(f"{count} servers of {model} start; their logs and records go to {folder}", soft_wrap=True)
    with running_fleet(settings, count, chosen, program, folder, policy=policy, port=port, most=max_servers) as made:
        shown: set[int] = set()
        told: set[int] = set()
        _show_new(made, shown)
        out.print(f"{router} is ready at {made.endpoint.url}/v1; Ctrl-C ends the fleet", markup=False, soft_wrap=True)
        while (fault := made.fault()) is None:
            for member in made.dead():
                if member.number not in told:
                    told.add(member.number)
                    out.print(f"server {member.number} {member.ending()}; the others go on, see {member.log}",
                              markup=False, soft_wrap=True)  # fmt: skip
            _show_new(made, shown)
            time.sleep(0.5)
        raise ExperimentError(fault)


def _show_new(made: "Fleet", shown: set[int]) -> None:
    for member in made.members:
        if member.number not in shown:
            shown.add(member.number)
            out.print(f"server {member.number}: {member.endpoint.url}", markup=False)
