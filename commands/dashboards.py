"""`sojourn server dashboards`: Grafana and Prometheus files; `up`: both running, or a preview of them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sojourn.commands.cli import bounds_of, need, out, output_option, slo_option
from sojourn.commands.help_page import HelpPage
from sojourn.metrics.errors import InputError
from sojourn.metrics.request.objectives import WHAT_SERVERS_TELL

TARGET = "127.0.0.1:8000"
TargetsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--target", help="host:port of a server to scrape; may stand several times; by default 127.0.0.1:8000"
    ),
]
ShareOption = Annotated[float, typer.Option(help="share of the requests that should be good, for the burn-rate alerts")]
SloOption = Annotated[str | None, slo_option("objectives in ms of servers that export none: lines and alerts")]

dashboards = HelpPage(
    invoke_without_command=True,
    help="Write the Grafana dashboards, the Prometheus rules and a compose file for both; `up` starts them.",
)


@dashboards.callback()
def write(
    context: typer.Context,
    output: Annotated[Path, output_option("folder to write into")] = Path("dashboards/generated"),
    target: TargetsOption = None,
    target_share: ShareOption = 0.99,
    slo: SloOption = None,
) -> None:
    """Write the files; nothing is started."""
    if context.invoked_subcommand is not None:
        return
    need("grafanalib")
    from sojourn.dashboards.alerts import AlertOptions
    from sojourn.dashboards.build import build_dashboards

    try:
        options = AlertOptions(target_share, bounds_of(slo, WHAT_SERVERS_TELL))
        written = build_dashboards(output, options, stack_of(target))
    except (NotADirectoryError, ValueError) as error:
        raise InputError(str(error)) from None
    for path in written:
        out.print(f"wrote {path}")


@dashboards.command()
def up(
    target: TargetsOption = None,
    target_share: ShareOption = 0.99,
    slo: SloOption = None,
    docker: Annotated[
        bool | None,
        typer.Option("--docker/--no-docker", help="Grafana in Docker, or Debian's prometheus and a preview; by default "
                     "Docker where it runs"),
    ] = None,
    prometheus_port: Annotated[int, typer.Option(min=1, max=65535, help="port of Prometheus on 127.0.0.1")] = 9090,
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="port of Grafana (by default 3000) or of the preview (8501) on 127.0.0.1"),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="folder that holds the files and the history; by default a temporary one")
    ] = None,
    runs: Annotated[Path, typer.Option(help="folder of the runs that the preview's other pages show")] = Path("runs"),
) -> None:  # fmt: skip
    """Start Prometheus and the dashboards for running servers; Ctrl-C ends all of it.

    With Docker it is Prometheus and Grafana, else Debian's prometheus and the app, which draws the same panels.
    """
    need("ui")
    from sojourn.commands.dashboards_up import Places, run_stack

    try:
        stack = stack_of(target, prometheus_port)
        run_stack(Places(stack, target_share, bounds_of(slo, WHAT_SERVERS_TELL), docker, port, data, runs))
    except (NotADirectoryError, ValueError) as error:
        raise InputError(str(error)) from None


def stack_of(targets: list[str] | None, prometheus_port: int = 9090):
    """Raises ValueError for a target that is no host:port."""
    from sojourn.dashboards.stack import Stack, checked_target

    checked = tuple(dict.fromkeys(map(checked_target, targets or [TARGET])))
    return Stack(checked, prometheus_port, host_network=sys.platform == "linux")
