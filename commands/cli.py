"""What the verbs share: the console, optional packages, run directories, and options with one meaning everywhere."""

import glob
import math
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from sojourn.commands import stopped as stop
from sojourn.metrics.errors import InputError, SojournError
from sojourn.metrics.installed import need as need

if TYPE_CHECKING:
    from sojourn.live.sensors.feed import SensorFeed
    from sojourn.metrics.run.directory import RunDirectory

RUNS = Path("runs")
MOST_OFFERED = 5  # runs of a folder
HEADER_VARIABLE = "SOJOURN_HEADER_"  # and the name of the header: the run files have this in place of the value

RunArgument = Annotated[Path, typer.Argument(help="a run directory, such as runs/demo")]


def rounded(value: float | None) -> str:
    """Three significant digits, thousands apart; a dash for nothing."""
    return "–" if value is None or math.isnan(value) else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def output_option(help: str) -> Any:
    """`--output` for what a verb writes: the same name in every verb."""
    return typer.Option("--output", "-o", metavar="PATH", help=help)


RunDirOption = Annotated[Path | None, output_option("run directory to write; by default a new folder in runs/")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override an engine setting; repeatable")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON instead of tables; progress goes to stderr")]
SeedOption = Annotated[
    int | None, typer.Option(help="seed of the arrivals, lengths and prompts; by default the scenario's")
]
ProcessesOption = Annotated[
    int, typer.Option(min=1, max=64, help="processes of the load generator that share the schedule")
]
ROUTER_HELP = "the router in front of several servers: vllm-router, dynamo or ray"
PolicyOption = Annotated[str | None, typer.Option(help="how the router chooses; by default its first policy")]
RouterEnvOption = Annotated[
    Path | None,
    typer.Option(help="virtual environment of the router; by default that of SOJOURN_ROUTER_ENV, else the path"),
]


VerboseOption = Annotated[
    bool, typer.Option("--verbose", "-v", help="print everything: all latencies, accounts, evidence and symptoms")
]
StopOption = Annotated[
    float | None,
    typer.Option(
        "--stop-when-resolved", metavar="SHARE", min=0.01, max=0.999,
        help="stop sending once it is resolved whether this share of the requests meets the SLO, such as 0.9; by a "
        "95% confidence sequence",
    ),
]  # fmt: skip


SensorsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SOURCE",
        help="sensors of its GPUs and host: the URL of a DCGM exporter, nvml, nvidia-smi, a file of `nvidia-smi dmon "
        "-o DT` as FILE@ZONE, or host; #0,1 behind it names the server's devices; repeatable",
    ),
]  # fmt: skip


def sensors_of(sources: Sequence[str] | None, servers: Sequence[str] = ()) -> "SensorFeed | None":
    """What `--sensors` names, not started yet; None where it is not given. Raises InputError."""
    if not sources:
        return None
    from sojourn.live.sensors.feed import SensorFeed

    return SensorFeed(sources, servers)


@contextmanager
def running_sensors(feed: "SensorFeed | None") -> Iterator[None]:
    """Says on stderr which of them showed nothing."""
    from sojourn.live.sensors.feed import running

    with running(feed):
        yield
    for problem in feed.problems if feed is not None else ():
        print(f"sojourn: {problem}", file=sys.stderr)


def discard_output(file: TextIO) -> None:
    """For a stream whose reader has left (`| head`): what is still in its buffer is no error at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


class PipeSafeConsole(Console):
    """A console whose reader may leave. That ends the printing; the run and the files still to be written go on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        discard_output(self.file)


out = PipeSafeConsole(highlight=False)


def print_json(document: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(document), indent=2).decode())


def _checked_slo(slo: str | None) -> str | None:
    bounds_of(slo)
    return slo


def slo_option(help: str = "objectives in ms for every class, in place of those of the run") -> Any:
    """`--slo`, whose syntax is checked before the verb does anything."""
    return typer.Option("--slo", metavar="'ttft:500 tpot:50'", callback=_checked_slo, help=help)


SloOption = Annotated[str | None, slo_option()]


def bounds_of(slo: str | None, judged_by: str = "") -> dict[str, float]:
    """The bounds in ms that `--slo` names, as `parse_bounds` has them; {} where it is not given. Raises InputError."""
    if slo is None:
        return {}
    from sojourn.metrics.request.objectives import parse_bounds

    try:
        return parse_bounds(slo, judged_by)
    except ValueError as error:
        raise InputError(f"--slo: {error}") from None


def slo_objectives(slo: str | None, judged_by: str = "") -> list[dict[str, Any]] | None:
    """What `--slo` names as `objectives` of run.json has it; None where it is not given. Raises InputError."""
    if slo is None:
        return None
    from sojourn.metrics.request.objectives import source_of

    return [{"klass": "all", "source": source_of(slo, "--slo"), **bounds_of(slo, judged_by)}]


def table(*columns: str, text: Collection[str] = ()) -> Table:
    """A table without lines. The columns in `text` stand left and may wrap; all others are numbers."""
    result = Table(box=None, padding=(0, 1))
    for name in columns:
        result.add_column(name, justify="left" if name in text else "right", no_wrap=name not in text)
    return result


def program_name() -> str:
    """How to call this program again from here."""
    if shutil.which("sojourn"):
        return "sojourn"
    return "python -m sojourn" if sys.argv[0].endswith(".py") else os.path.relpath(sys.argv[0])


def print_again(context: typer.Context, label: str, *words: str, note: str = "") -> None:
    """Prints the command that was given, in today's words, without `--output` and with more words. The value of a
    header may be a secret, so a variable stands for it."""
    given: list[str] = []
    variables: list[str] = []
    verb: Any = context
    while verb.parent is not None:
        given, verb = [str(verb.info_name), *given], verb.parent
    for param in context.command.params:
        name, value = param.name or "", context.params.get(param.name or "")
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE" or name == "output":
            continue
        option = next((each for each in param.opts if each.startswith("--")), None)
        if isinstance(value, bool):
            given.append(str(option if value else param.secondary_opts[0]))
            continue
        for single in value if isinstance(value, list | tuple) else [value]:
            text = str(single)
            if name == "header":
                header, hidden = hidden_header(text)
                text = f"{header}: {hidden}"
                variables += [hidden[2:-1]] if hidden[2:-1] == header_variable(header) else []
            given += [text] if option is None else [option, text]
    out.print(f"{label:<14} {program_name()} {shlex.join([*given, *words])}{note}", markup=False, soft_wrap=True)
    if variables:
        out.print(f"{'':<14} (set {' and '.join(variables)} first)", markup=False)


def hidden_header(given: str) -> tuple[str, str]:
    """Of `Name: value`: the name, and the variable that has the value, as `${VARIABLE}`. A variable stays."""
    name, _, value = (part.strip() for part in given.partition(":"))
    return name, value if re.fullmatch(r"\$\{\w+\}", value) else f"${{{header_variable(name)}}}"


def header_variable(name: str) -> str:
    """The environment variable that has the value of a header from the command line."""
    return HEADER_VARIABLE + re.sub(r"\W", "_", name).upper()


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on a terminal what is going on and for how long. On stderr, so that a pipe gets the result alone."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def writing(path: Path, advice: str = "choose another with --output") -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SojournError(f"{path} cannot be written: {error.strerror}; {advice}") from None


def find_run(path: Path) -> Path:
    """The path itself, or the folder of that name in runs/."""
    return RUNS / path if not path.exists() and (RUNS / path).is_dir() else path


def open_run(path: Path, objectives: Sequence[Mapping[str, Any]] | None = None) -> "RunDirectory":
    """Opens a run directory, by path or by its name in runs/. First recovers what a killed load generator left.
    `objectives` stand in for those of the run."""
    from sojourn.interop.probe.folder import open_server_run

    path = find_run(path)
    _refuse_folder_of_runs(path)
    if path.is_dir():
        from sojourn.loadgen.run.run_files import recover

        recover(path)
    run = open_server_run(path, objectives)
    _refuse_unmeasured(run, objectives)
    return run


def _refuse_unmeasured(run: "RunDirectory", objectives: Sequence[Mapping[str, Any]] | None) -> None:
    """Raises InputError for an objective that was given, and that no request of the run can be judged by."""
    from sojourn.metrics.request.objectives import CLIENT_OBJECTIVES, OBJECTIVE_NAMES

    for name in (name for name in CLIENT_OBJECTIVES for each in objectives or () if each.get(name) is not None):
        requests = run.requests()
        if name not in requests or requests[name].isna().all():
            raise InputError(
                f"--slo: {run.name} has no {OBJECTIVE_NAMES[name]}: no client read an answer with its reasoning apart "
                "from it (the server's reasoning parser); give ttft, which counts the first token of either"
            )


def _refuse_folder_of_runs(path: Path) -> None:
    """Raises InputError with the newest runs of a folder of them, and the command for the newest."""
    from sojourn.metrics.run.listing import list_runs, newest

    if (path / "run.json").exists() or not any(path.glob("*/run.json")):
        return
    found = list_runs(path)
    given = {str(path), str(path.name)}
    words = [str(path / newest(found).name) if word.rstrip("/") in given else word for word in sys.argv[1:]]
    offered = [run for run in found if not run.is_passed_over or run is newest(found)][:MOST_OFFERED]
    lines = [f"  {path / run.name}  {(run.recorded_at or '')[:16].replace('T', ' ')}  {run.state or ''}".rstrip()
             for run in offered]  # fmt: skip
    if len(found) > len(offered):
        lines.append(f"  and {len(found) - len(offered)} more: {program_name()} runs {path}")
    raise InputError(
        f"{path} is a folder of {len(found)} runs, and this takes one; the newest:\n" + "\n".join(lines)
        + f"\n{program_name()} {shlex.join(words)}"
    )  # fmt: skip


def new_run(name: str) -> Path:
    return RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def run_progress(path: Path, is_shown: bool = True) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Gives the page of a new run. If Ctrl-C or an error ends the run, names its directory, or those beside it whose
    names begin with its name."""
    from sojourn.loadgen.run.progress_page import ProgressPage

    existed = runs_named(path)
    try:
        with ProgressPage(out) if is_shown else nullcontext(lambda _: None) as progress:
            yield progress
    except (KeyboardInterrupt, Exception) as error:
        stopped = "stopped; " if isinstance(error, KeyboardInterrupt) else ""
        for kept in sorted(runs_named(path) - existed):
            stop.kept.append(kept)
            with suppress(OSError):  # a terminal that was closed
                out.print(f"{stopped}what was recorded is in {kept}: sojourn diagnose {kept}",
                          markup=False, soft_wrap=True)  # fmt: skip
        raise


def runs_named(path: Path) -> set[Path]:
    return {file.parent for file in path.parent.glob(f"{glob.escape(path.name)}*/run.json")}
