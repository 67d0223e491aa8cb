"""`sojourn watch`: a passive doctor of live servers."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import SensorsOption, bounds_of, out, print_json, sensors_of, slo_option, working
from sojourn.metrics.errors import InputError
from sojourn.metrics.request.objectives import WHAT_SERVERS_TELL

if TYPE_CHECKING:
    from sojourn.live.watch.recorder import Recorders
    from sojourn.live.watch.watcher import Watcher


def watch(
    urls: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[URL]...",
            help="servers whose /metrics is read (vLLM, SGLang and others, or ours), or a Prometheus that scrapes "
            "them; SOJOURN_API_KEY has the key"
        ),
    ] = None,
    prometheus: Annotated[
        list[str] | None, typer.Option(help="address of a Prometheus: every engine that it scrapes; repeatable")
    ] = None,
    select: Annotated[
        str, typer.Option(metavar="MATCHERS", help="only these series of the Prometheus, such as 'job=\"vllm\"'")
    ] = "",
    slo: Annotated[str | None, slo_option("objectives in ms, such as 'ttft:500 tpot:50'")] = None,
    server_run: Annotated[
        list[Path] | None,
        typer.Option(
            help="run directory of a Sojourn server on this host (serve --run-dir), or folder of a probe: its records "
            "give the full diagnosis; repeatable, in the order of the servers"
        ),
    ] = None,
    for_: Annotated[
        float, typer.Option("--for", min=2, max=3600, help="seconds of the window that a verdict is of")
    ] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="observe for one window, print the verdict, end")] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=1, max=65535,
            help="also export states and findings at /metrics of this port of 127.0.0.1, for a Prometheus"
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="also write every scrape to a run in this folder, for diagnose, compare, report and ui"),
    ] = None,
    sensors: SensorsOption = None,
    json: Annotated[bool, typer.Option("--json", help="with --once: print the verdict as JSON")] = False,
) -> None:  # fmt: skip
    """Watch live servers: what they suffer from now, and why. It sends no load and reads no prompt."""
    from sojourn.live.watch.fetch import name_cut
    from sojourn.live.watch.recorder import Recorders
    from sojourn.live.watch.watcher import Watcher

    if json and not once:
        raise InputError("--json takes --once: a page that goes on has no end to print")
    if once and metrics_port is not None:
        raise InputError("--metrics-port is of a watch that goes on; leave it or --once out")
    for cut in filter(None, map(name_cut, urls or ())):
        print(f"sojourn: {cut}", file=sys.stderr)
    objectives = bounds_of(slo, WHAT_SERVERS_TELL)
    feed = sensors_of(sensors, [*(urls or ()), *(prometheus or ())])
    stated = feed.stated() if feed is not None else {}
    recorders = None if record is None else Recorders(record, objectives, stated=stated)
    watcher = Watcher(
        urls or [], objectives, window_s=for_, records=server_run or (), prometheus=prometheus or (), select=select,
        record=recorders, sensors=feed,
    ).start()  # fmt: skip
    try:
        if once:
            raise typer.Exit(_once(watcher, for_, json))
        if metrics_port is not None:
            from sojourn.live.watch.exposition import serve

            serve(metrics_port, watcher.watch)
        _page(watcher)
    finally:
        watcher.stop()
        for problem in feed.problems if feed is not None else ():
            print(f"sojourn: {problem}", file=sys.stderr)
        if recorders is not None:
            _say_recorded(recorders, watcher.record_problem)


def _say_recorded(recorders: "Recorders", problem: str) -> None:
    """Where the runs are, on stderr: the output may be JSON."""
    for run in recorders.close():
        print(f"sojourn: recorded in {run.path}; next: sojourn diagnose {run.path}", file=sys.stderr)
    for each in filter(None, [problem, *recorders.problems]):
        print(f"sojourn: {each}", file=sys.stderr)


def _once(watcher: "Watcher", seconds: float, as_json: bool) -> int:
    from sojourn.live.watch.document import exit_code
    from sojourn.live.watch.terminal import report

    with working(f"watching for {seconds:.0f} s"):
        watcher.wait_for(seconds)
    found = watcher.watch(steady=False)
    if as_json:
        print_json(found)
    else:
        out.print(report(found))
    return exit_code(found.state)


def _page(watcher: "Watcher") -> None:
    """A page to leave open on a terminal; elsewhere a line for each change."""
    from sojourn.live.watch.terminal import change_line, page

    if not out.is_terminal:
        said = 0
        while True:
            changes, said = watcher.changes_after(said)
            for change in changes:
                print(change_line(change), flush=True)
            time.sleep(0.5)
    from rich.live import Live

    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            live.update(page(watcher.watch(), watcher.histories(), watcher.changes(), out.size), refresh=True)
            time.sleep(1)
