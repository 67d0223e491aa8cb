"""The program `sojourn`: `verbs` has the table of its verbs, and this file turns errors into exit codes."""

import signal
import sys
from typing import Annotated

import typer

from sojourn.commands.cli import discard_output, program_name
from sojourn.commands.help_page import HelpPage
from sojourn.commands.verb_group import PROGRAM, VerbGroup
from sojourn.metrics.errors import SojournError

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
        from sojourn.metrics.machine.host import own_version

        print(f"sojourn {own_version()}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """Options of the program itself."""


def _interrupt(*_: object) -> None:
    """SIGTERM and a closed terminal end an experiment as Ctrl-C does: its processes stop, its records stay."""
    raise KeyboardInterrupt


def main() -> None:
    """Entry point. An expected failure is a sentence on stderr and an exit code, see `metrics.errors`.

    `loadgen.exit_code` has the exit codes of a load that was sent.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        app(prog_name=program_name())
    except SojournError as error:
        print(f"sojourn: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        try:
            sys.stdout.flush()
        except BrokenPipeError:  # `--json | head`
            discard_output(sys.stdout)
