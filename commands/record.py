"""`sojourn record`: one run of a server that others load: started or found, its pages, its log, and the probe."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import (
    SensorsOption,
    SloOption,
    VerboseOption,
    bounds_of,
    output_option,
    program_name,
    sensors_of,
    working,
)
from sojourn.commands.summary import diagnose_run, next_steps, print_diagnosis
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import Ended
from sojourn.metrics.request.objectives import WHAT_SERVERS_TELL

if TYPE_CHECKING:
    from sojourn.live.record.found import FoundServer
    from sojourn.live.record.recording import Recording

WINDOW_S = 60.0
LOOK_S = 0.5


def record(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND]", help="starts the server: -- vllm serve MODEL")
    ] = None,
    pid: Annotated[int | None, typer.Option(min=1, help="a server that runs: its process")] = None,
    container: Annotated[str | None, typer.Option(help="a server that runs: its container of docker or podman")] = None,
    unit: Annotated[str | None, typer.Option(help="a server that runs: its unit of systemd")] = None,
    base_url: Annotated[str | None, typer.Option(help="its address, where that cannot be found out")] = None,
    log: Annotated[Path | None, typer.Option(help="its log file, where its output cannot be read")] = None,
    output: Annotated[Path | None, output_option("folder of the run; by default below runs/")] = None,
    slo: SloOption = None,
    for_: Annotated[
        float | None, typer.Option("--for", min=2, help="seconds to record; by default until Ctrl-C, or its end")
    ] = None,
    sensors: SensorsOption = None,
    no_probe: Annotated[bool, typer.Option("--no-probe", help="attach nothing to the server that is started")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="keep the server's log to the file")] = False,
    verbose: VerboseOption = False,
) -> None:  # fmt: skip
    """Record a server while others use it: start it (behind --), or name one that runs. Then diagnose the run."""
    from sojourn.live.record.command_line import read_command
    from sojourn.live.record.recording import Recording, default_folder

    named = [each for each in (command or None, pid, container, unit) if each is not None]
    if len(named) > 1:
        raise InputError("name one server: a command behind --, --pid, --container, --unit, or --base-url alone")
    if command and log is not None:
        raise InputError("--log is of a server that runs; of one that is started here the output is followed")
    objectives = bounds_of(slo, WHAT_SERVERS_TELL)
    started = read_command(command, base_url) if command else None
    found = None if started else _found(pid, container, unit, base_url, log)
    title = started.title if started else found.title if found else ""
    url = started.url if started else found.url if found else ""
    feed = sensors_of(sensors, [] if named else [url])  # a named one is of this machine, whatever its address
    recording = Recording(output or default_folder(title), objectives, WINDOW_S, _pass_on if not quiet else _hide, feed)
    if started is not None:
        recording.start(started, not no_probe)
    elif found is not None:
        recording.find(found)
    for note in recording.notes:
        _say(note)
    _say(f"recording {title} at {url} in {recording.folder}; "
         "Ctrl-C ends it")  # fmt: skip
    _wait(recording, for_)
    _finish(recording, verbose)


def _found(
    pid: int | None, container: str | None, unit: str | None, url: str | None, log: Path | None
) -> "FoundServer":
    from dataclasses import replace

    from sojourn.live.record.found import FoundServer, by_container, by_pid, by_unit
    from sojourn.live.watch.fetch import base_of

    if pid is not None:
        found = by_pid(pid, url)
    elif container is not None:
        found = by_container(container, url)
    elif unit is not None:
        found = by_unit(unit, url)
    elif url is not None:
        found = FoundServer("server", base_of(url), (), None, ())
    else:
        raise InputError("no server is named: give its command behind --, --pid, --container, --unit, or --base-url")
    if log is not None and not log.is_file():
        raise InputError(f"{log} is no file")
    return found if log is None else replace(found, log=log)


def _wait(recording: "Recording", seconds: float | None) -> None:
    """Says what the watch says, until the time is over, the server ends, or Ctrl-C."""
    from sojourn.live.watch.terminal import change_line

    until_s, said = None if seconds is None else time.monotonic() + seconds, 0
    try:
        while not recording.is_over and (until_s is None or time.monotonic() < until_s):
            news, said = recording.news(said)
            for each in news if recording.has_answered else ():
                _say(change_line(each))
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        pass


def _finish(recording: "Recording", verbose: bool) -> None:
    from sojourn.live.record.recording import last_lines

    with working("ending the record"):
        ended = recording.end()
    for each in ended.problems:
        if each not in recording.notes:
            _say(each)
    if ended.run is None:
        what = f" The server ended with exit code {ended.exit_code}." if ended.exit_code else ""
        _say(f"nothing was recorded: no page of /metrics was answered.{what}")
        if ended.log is not None:
            _say(f"its log: {ended.log}; its last lines:")
            print(last_lines(ended.log), file=sys.stderr)
        raise typer.Exit(Ended.FAILED)
    with working(f"diagnosing {ended.run.name}"):
        diagnosis = diagnose_run(ended.run)
    of_log = [] if ended.log is None else [("its log", f"{program_name()} triage {ended.log}")]
    print_diagnosis(diagnosis, ended.run, verbose, [*next_steps(ended.run, diagnosis), *of_log])


def _say(text: str) -> None:
    print(f"sojourn: {text}", file=sys.stderr, flush=True)


def _pass_on(content: bytes) -> None:
    sys.stderr.buffer.write(content)
    sys.stderr.buffer.flush()


def _hide(_: bytes) -> None:
    pass
