"""`sojourn dashboards`: Grafana and Prometheus files."""

from pathlib import Path
from typing import Annotated

import typer

from commands.cli import need, out
from metrics.errors import InputError


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
        out.print(f"wrote {path}")
