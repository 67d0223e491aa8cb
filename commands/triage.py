"""`sojourn triage`: what can be concluded from a log, a page, a summary, flags: whatever one has in hand."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sojourn.commands.cli import bounds_of, out, print_json, slo_option, working
from sojourn.metrics.errors import InputError
from sojourn.metrics.request.objectives import WHAT_SERVERS_TELL

if TYPE_CHECKING:
    from sojourn.triage.document import Triage

STDIN = "-"


def triage(
    given: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE|URL|-...",
            help="logs, pages of /metrics, results and summaries of benchmarks, flags, config.json, nvidia-smi; the "
            "address of a server, whose page is read for some seconds; - for the standard input"
        ),
    ],
    slo: Annotated[str | None, slo_option("objectives in ms, such as 'ttft:500 tpot:50'")] = None,
    for_: Annotated[float, typer.Option("--for", min=2, max=600, help="seconds that a server's page is read")] = 10.0,
    json: Annotated[bool, typer.Option("--json", help="print the answer as JSON")] = False,
) -> None:  # fmt: skip
    """Say what is certain, likely and unknowable from the evidence that you have, and the one next command.

    Several pieces of evidence are read together. Nothing is sent to a server, except that its /metrics is read.
    """
    from sojourn.triage.document import exit_code
    from sojourn.triage.terminal import report

    found = _triage(given, bounds_of(slo, WHAT_SERVERS_TELL), for_)
    if json:
        print_json(found)
    else:
        out.print(report(found), markup=False, highlight=False, soft_wrap=True)
    sys.exit(exit_code(found))


def _reading(files: list[str]) -> str:
    """What is read, and how much: a large log takes seconds."""
    sizes = [path.stat().st_size for path in map(Path, files) if path.is_file()]
    return (
        f"reading {', '.join(Path(each).name for each in files)} ({sum(sizes) / 2**20:,.1f} MiB)"
        if sizes
        else "reading"
    )


def _triage(given: list[str], bounds: dict[str, float], seconds: float) -> "Triage":
    from sojourn.live.watch.fetch import is_address
    from sojourn.triage.conclude import triage_given

    if given.count(STDIN) > 1:
        raise InputError("- is given twice, and there is one standard input; give it once")
    texts = {STDIN: sys.stdin.buffer.read()} if STDIN in given else {}
    urls = [each for each in given if is_address(each) and not Path(each).exists()]
    files = [each for each in given if each not in urls and each != STDIN]
    with working(f"reading the page of {', '.join(urls)} for {seconds:.0f} s" if urls else _reading(files)):
        return triage_given(files, texts, urls, bounds, seconds=seconds)
