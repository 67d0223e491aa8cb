"""`sojourn runs`: the runs of a folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from sojourn.commands.cli import RUNS, out, print_json

if TYPE_CHECKING:
    from sojourn.metrics.run.listing import ListedRun

COLOURS = {
    "healthy": "green", "degraded": "yellow", "overloaded": "red", "stuck": "red", "invalid": "dim",
    "inconclusive": "dim",
}  # fmt: skip
INDENT = "  "


def runs(
    folder: Annotated[Path, typer.Argument(help="folder whose folders are runs")] = RUNS,
    json: Annotated[bool, typer.Option("--json", help="print the list as JSON")] = False,
) -> None:
    """List the runs in a folder, newest first: when, which scenario, how many requests, and the verdict."""
    from sojourn.metrics.run.listing import list_runs
    from sojourn.scripting.documents import RunList

    found = list_runs(folder)
    if json:
        print_json(RunList(runs=found))
        return
    for each in found:
        _print(each)
    if not found:
        out.print(f"no run in {folder}; record one: sojourn run demo", markup=False)


def _print(run: "ListedRun") -> None:
    """What it is, and below it the first sentence of its verdict."""
    when = (run.recorded_at or "")[:16].replace("T", " ")
    count = "" if run.requests is None else f"{run.requests:,} request{'' if run.requests == 1 else 's'}"
    facts = " · ".join(filter(None, (when, run.scenario or run.source or "", run.model or "", count)))
    lines = [Text.assemble((run.name, "bold"), "  ", (facts, "dim"))]
    if run.unreadable:
        lines.append(Text(f"cannot be read: {run.unreadable}", style="red"))
    if run.note:
        lines.append(Text(run.note, style="dim"))
    if not run.is_passed_over:
        verdict = (run.headline or "no diagnosis yet").partition(". ")[0]
        state = f"{run.verdict} " if run.verdict else ""
        lines.append(Text.assemble((state, COLOURS.get(run.state or "", "")), verdict))
    rows = [row for line in lines for row in line.wrap(out, out.width - len(INDENT))]
    for place, row in enumerate(rows):
        row.rstrip()
        out.print(Text.assemble(INDENT if place else "", row), soft_wrap=True)
