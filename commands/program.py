"""The program `sojourn`: `verbs` has the table of its verbs, `entry` runs it."""

from typing import Annotated

import typer

from sojourn.commands.help_page import HelpPage
from sojourn.commands.verb_group import PROGRAM, VerbGroup

app = HelpPage(
    name=PROGRAM,
    cls=VerbGroup,
    help="Where the time of a large language model server goes: watch it or load it, and read which of four lifecycles "
    "(token, compute, memory, request) is the bottleneck, and what would prove it.",
    epilog="`sojourn help --all` lists all commands, `sojourn help COMMAND` the options of one.",
    no_args_is_help=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from sojourn.metrics.version import own_version

        print(f"sojourn {own_version()}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """Options of the program itself."""
