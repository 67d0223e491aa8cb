"""`sojourn fleet`: several servers behind a router that exists."""

import time
from pathlib import Path
from typing import Annotated

import typer

from commands.cli import ROUTER_HELP, PolicyOption, RouterEnvOption, need, new_run, out
from commands.fleet_replay import replay
from commands.help_page import HelpPage
from metrics.errors import ExperimentError, InputError

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
    run_dir: Annotated[
        Path | None, typer.Option(help="folder for logs and the records of each server; by default a new one in runs/")
    ] = None,
) -> None:
    """Start COUNT servers and the router, and serve until Ctrl-C, which ends them all."""
    need("engine")
    from engine.options import assignments, check_settings
    from loadgen.fleet.fleet import fleet as running_fleet
    from loadgen.fleet.routers import installed, known_router

    chosen = known_router(router, policy)
    program = installed(chosen, router_env)
    settings = {"model": model} | assignments(set_ or [], "--set")
    check_settings({"model": model}, settings)
    folder = run_dir or new_run("fleet")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty; choose another with --run-dir")
    out.print(f"{count} servers of {model} start; their logs and records go to {folder}", soft_wrap=True)
    with running_fleet(settings, count, chosen, program, folder, policy=policy, port=port) as made:
        for member in made.members:
            out.print(f"server {member.number}: {member.endpoint.url}", markup=False)
        out.print(f"{router} is ready at {made.endpoint.url}/v1; Ctrl-C ends the fleet", markup=False, soft_wrap=True)
        told: set[int] = set()
        while (fault := made.fault()) is None:
            for member in made.dead():
                if member.number not in told:
                    told.add(member.number)
                    code = member.process.returncode
                    out.print(f"server {member.number} ended with exit code {code}; the others go on, see {member.log}",
                              markup=False, soft_wrap=True)  # fmt: skip
            time.sleep(0.5)
        raise ExperimentError(fault)
