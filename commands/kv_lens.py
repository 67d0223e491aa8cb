"""`sojourn kv-lens`: what a KV cache holds, evicts, and would gain from more memory."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import need, open_run, out, output_option, print_json, working
from sojourn.metrics.errors import InputError

if TYPE_CHECKING:
    from sojourn.live.kv_lens.document import KvLens
    from sojourn.live.kv_lens.session import LensSession

LINE_SECONDS = 10.0  # between two lines, where the output is no terminal


def kv_lens(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN|ADDRESS…", help="a run directory or the folder of a probe; or where live servers publish KV "
            "events (tcp://HOST:PORT, ipc://PATH), or the http address of a server that says where"
        ),
    ],
    replay: Annotated[
        list[str] | None,
        typer.Option(help="address that answers for missed events, in the order of the servers; repeatable"),
    ] = None,
    topic: Annotated[str, typer.Option(help="only events of this topic")] = "",
    metrics: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="http address of each server: its /metrics counts hits, which events do not "
                     "show; repeatable"),
    ] = None,
    run_dir: Annotated[
        Path | None, output_option("record the events into this run directory, as hashes without tokens")
    ] = None,
    for_: Annotated[
        float, typer.Option("--for", min=2, max=86_400, help="with --once: seconds that live servers are read")
    ] = 60.0,
    once: Annotated[bool, typer.Option("--once", help="read live servers for a while, print the report, end")] = False,
    no_goodput: Annotated[
        bool,
        typer.Option("--no-goodput", help="of a run: leave out the replays that say what twice the memory is worth"),
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON; of live servers with --once")] = False,
) -> None:  # fmt: skip
    """Show what a KV cache holds, evicts and misses, and what more memory would hit.

    Of a run: from the records of its requests, and its KV events. Of live servers (Sojourn, vLLM, SGLang): from their
    KV events. Token ids in events are dropped unread. It sends no load.
    """
    from sojourn.live.watch.fetch import is_address

    live = [source for source in sources if is_address(source)]
    if live and len(live) < len(sources):
        raise InputError("runs and live servers cannot be mixed; give one run, or addresses")
    if not live:
        if len(sources) > 1:
            raise InputError(f"{len(sources)} runs are given; give one")
        for name, value in (("--replay", replay), ("--topic", topic), ("--metrics", metrics), ("--output", run_dir),
                            ("--once", once)):  # fmt: skip
            if value:
                raise InputError(f"{name} is for live servers; a run is read as it was recorded")
        _of_run(Path(sources[0]), with_goodput=not no_goodput, as_json=json)
        return
    if json and not once:
        raise InputError("--json takes --once: a page that goes on has no end to print")
    if no_goodput:
        raise InputError("--no-goodput is for a run; nothing is replayed of live servers")
    need("zmq")
    _of_servers(live, replay or [], topic, metrics or [], run_dir, for_ if once else None, as_json=json)


def _of_run(path: Path, *, with_goodput: bool, as_json: bool) -> None:
    from sojourn.live.kv_lens.terminal import report
    from sojourn.scripting.answers import kv_lens_of

    with working("reading the run"):
        found = kv_lens_of(open_run(path), with_goodput=with_goodput)
    if as_json:
        print_json(found)
    else:
        out.print(report(found))


def _of_servers(
    sources: Sequence[str], replay: Sequence[str], topic: str, metrics: Sequence[str], run_dir: Path | None,
    seconds: float | None, *, as_json: bool,
) -> None:  # fmt: skip
    from sojourn.live.kv_lens.addresses import endpoints_from
    from sojourn.live.kv_lens.session import LensSession

    endpoints, counted = endpoints_from(sources, replay, topic)
    session = LensSession(endpoints, [*counted, *metrics], run_dir).start()
    try:
        if seconds is None:
            _page(session)
        else:
            with working(f"reading KV events for {seconds:.0f} s"):
                time.sleep(seconds)
    finally:
        session.stop()
        if seconds is not None or not out.is_terminal:
            _print(session.lens(), as_json=as_json)
        if run_dir is not None and not as_json:
            out.print(f"recorded in    {run_dir}", markup=False)


def _page(session: "LensSession") -> None:
    """A page to leave open on a terminal; elsewhere a line now and then."""
    from sojourn.live.kv_lens.terminal import line, page

    if not out.is_terminal:
        while True:
            time.sleep(LINE_SECONDS)
            print(line(session.lens(), session.seconds()), flush=True)
    from rich.live import Live

    with Live(console=out, screen=True, auto_refresh=False) as live:
        while True:
            live.update(page(session.lens(), session.seconds(), out.size), refresh=True)
            time.sleep(1)


def _print(lens: "KvLens", *, as_json: bool) -> None:
    from sojourn.live.kv_lens.terminal import report

    if as_json:
        print_json(lens)
    else:
        out.print(report(lens))
