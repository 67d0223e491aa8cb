"""The program `sojourn`. Each verb is a file of commands/; this one registers them and turns errors into exit codes."""

import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sojourn.commands.bench import bench
from sojourn.commands.bench_serve import bench_serve
from sojourn.commands.calibrate import calibrate
from sojourn.commands.calibrate_device import calibrate_device
from sojourn.commands.capacity import capacity
from sojourn.commands.cli import discard_output, program_name
from sojourn.commands.compare import compare
from sojourn.commands.dashboards import dashboards
from sojourn.commands.demo import demo
from sojourn.commands.diagnose import diagnose
from sojourn.commands.explain import explain
from sojourn.commands.export import export
from sojourn.commands.faults import faults
from sojourn.commands.fleet import fleet
from sojourn.commands.help_page import HelpPage
from sojourn.commands.import_result import import_result
from sojourn.commands.join import join
from sojourn.commands.keys import keys
from sojourn.commands.kv_lens import kv_lens
from sojourn.commands.ladder import ladder
from sojourn.commands.lint import lint
from sojourn.commands.load import load
from sojourn.commands.mcp import mcp
from sojourn.commands.otlp import otlp
from sojourn.commands.plan import plan
from sojourn.commands.quantize import quantize
from sojourn.commands.replay import replay
from sojourn.commands.report import report
from sojourn.commands.run import run
from sojourn.commands.runs import runs
from sojourn.commands.serve import serve
from sojourn.commands.sweep import sweep
from sojourn.commands.trace import trace
from sojourn.commands.ui import ui
from sojourn.commands.usage import usage
from sojourn.commands.verify import verify
from sojourn.commands.watch import watch
from sojourn.live.watch.document import EXIT_CODES as WATCH_CODES
from sojourn.loadgen.exit_code import EXIT_CODES
from sojourn.metrics.errors import SojournError
from sojourn.metrics.machine.host import own_version

app = HelpPage(
    name="sojourn",
    help="Where the time of a large language model server goes: serve a model, replay a scenario against it, and read "
    "which of four lifecycles (token, compute, memory, request) is the bottleneck, and what would prove it.",
    no_args_is_help=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"sojourn {own_version()}")
        raise typer.Exit


@app.callback()
def options(
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """Options of the program itself."""


def register(panel: str, *verbs: Callable[..., None], **settings: Any) -> None:
    for verb in verbs:
        app.command(rich_help_panel=panel, **settings)(verb)


# for a verb that parses its own arguments, --help among them
OWN_PARSER = {
    "add_help_option": False,
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}

register("Serve", serve, quantize, usage)
app.add_typer(dashboards, name="dashboards", rich_help_panel="Serve")
app.add_typer(keys, name="keys", rich_help_panel="Serve")
app.add_typer(fleet, name="fleet", rich_help_panel="Serve")
register("Load and search", run, load, demo, epilog=EXIT_CODES)
register("Load and search", bench_serve, **OWN_PARSER)
register("Load and search", sweep, capacity, plan, ladder)
register("Diagnose and explain", diagnose, lint, replay, explain, report, ui, trace, join, runs, mcp)
register("Diagnose and explain", watch, epilog=WATCH_CODES)
register("Diagnose and explain", kv_lens)
register("Compare", compare, verify, export)
register("Compare", import_result, name="import", epilog=EXIT_CODES)
app.add_typer(otlp, name="otlp", rich_help_panel="Compare")
register("Compare", bench, **OWN_PARSER)
register("Calibrate", calibrate, calibrate_device)
app.add_typer(faults, name="faults", rich_help_panel="Calibrate")


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
