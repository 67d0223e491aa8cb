"""What every verb shares: the console, failures with an exit code, the options that mean the same everywhere."""

import importlib.util
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, TextIO

import typer
from rich.console import Console

from metrics.errors import SojournError
from metrics.run.directory import RunDirectory


def print_nowhere(file: TextIO) -> None:
    """For a stream that nobody reads any more (`| head`): what is still in its buffer is no error at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


class UnreadConsole(Console):
    """A console whose reader may leave: that ends the printing, not the run or the files that are still to come."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        print_nowhere(self.file)


out = UnreadConsole()
RUNS = Path("runs")

ScenarioArgument = Annotated[str, typer.Argument(help="name of a bundled scenario, or a scenario file")]
RunArgument = Annotated[Path, typer.Argument(help="a run directory, such as runs/demo")]
RunDirOption = Annotated[Path | None, typer.Option(help="where the run goes; by default a new folder below runs/")]
SeedOption = Annotated[int | None, typer.Option(help="another draw of the scenario's arrivals, lengths and prompts")]
ProcessesOption = Annotated[
    int, typer.Option(min=1, max=64, help="share the schedule among so many processes of the load generator")
]


def need(extra: str, *modules: str) -> None:
    """Fails with the way out if an extra of the package is not installed."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        raise SojournError(
            f"this command needs {', '.join(missing)}; install its extra, in Sojourn's folder: pip install '.[{extra}]'"
        )


def open_run(path: Path) -> RunDirectory:
    """A run directory, or the name of one below runs/; what a killed load generator left unread is read first."""
    if not path.exists() and (RUNS / path).is_dir():
        path = RUNS / path
    if path.is_dir() and importlib.util.find_spec("httptools"):
        from loadgen.run.run_files import recover

        recover(path)
    return RunDirectory.open(path)


def new_run(name: str) -> Path:
    return RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


@contextmanager
def run_told_when_stopped(path: Path) -> Iterator[None]:
    """Says, of a run that Ctrl-C or an error ends, where what it recorded is; nothing of one that was not begun."""
    was_there = (path / "run.json").exists()
    try:
        yield
    except (KeyboardInterrupt, Exception) as error:
        if (path / "run.json").exists() and not was_there:
            stopped = "stopped; " if isinstance(error, KeyboardInterrupt) else ""
            with suppress(OSError):  # a terminal that was closed
                out.print(f"{stopped}what was recorded is in {path}: sojourn diagnose {path}", highlight=False,
                          markup=False, soft_wrap=True)  # fmt: skip
        raise
