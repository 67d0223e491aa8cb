"""The program `sojourn`. Each verb is a file of commands/; this one registers them and turns errors into exit codes."""

import signal
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from commands.bench import bench
from commands.bench_serve import bench_serve
from commands.calibrate import calibrate
from commands.calibrate_device import calibrate_device
from commands.capacity import capacity
from commands.cli import discard_output, program_name
from commands.compare import compare
from commands.dashboards import dashboards
from commands.demo import demo
from commands.diagnose import diagnose
from commands.explain import explain
from commands.export import export
from commands.faults import faults
from commands.fleet import fleet
from commands.help_page import HelpPage
from commands.import_result import import_result
from commands.join import join
from commands.keys import keys
from commands.kv_lens import kv_lens
from commands.ladder import ladder
from commands.lint import lint
from commands.load import load
from commands.mcp import mcp
from commands.otlp import otlp
from commands.plan import plan
from commands.quantize import quantize
from commands.replay import replay
from commands.report import report
from commands.run import run
from commands.runs import runs
from commands.serve import serve
from commands.sweep import sweep
from commands.trace import trace
from commands.ui import ui
from commands.usage import usage
from commands.verify import verify
from commands.watch import watch
from loadgen.exit_code import EXIT_CODES
from metrics.errors import SojournError
from metrics.live.document import EXIT_CODES as WATCH_CODES
from metrics.machine.host import own_version

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
