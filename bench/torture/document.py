"""docs/results/reliability.md: the rows that the scripts measured. Rows of a script that did not run now stay."""

import re
from collections.abc import Sequence

from bench.torture.promises import Outcome
from bench.torture.server import ROOT
from sojourn.metrics.machine.host import hardware
from sojourn.metrics.whole_file import write_whole

PAGE = ROOT / "docs" / "results" / "reliability.md"


def section(outcome: Outcome, machine: str) -> str:
    rows = [
        f"| {cell(promise.text)} | {cell(promise.figure)} | {cell(promise.bound)} | {promise.verdict} |"
        for promise in outcome.promises
    ]
    return "\n".join(
        [
            f"<!-- {outcome.script} -->",
            f"`{outcome.command}`, {outcome.date}, {machine}, load average {outcome.load_average} before the start, "
            f"{outcome.seconds:.0f} s",
            "",
            "| promise | figure | bound | verdict |",
            "|---|---|---|---|",
            *rows,
            f"<!-- /{outcome.script} -->",
        ]
    )


def cell(text: str) -> str:
    """One line, without the names of temporary folders."""
    return re.sub(r"/tmp/torture-\w+", "FOLDER", " ".join(text.split())).replace("|", "\\|")


def with_sections(page: str, outcomes: Sequence[Outcome], machine: str) -> str:
    """The page with each outcome between its two markers. Raises ValueError where a script has none."""
    for outcome in outcomes:
        marked = re.compile(rf"<!-- {outcome.script} -->.*?<!-- /{outcome.script} -->", re.DOTALL)
        new = section(outcome, machine)
        page, found = marked.subn(lambda _, new=new: new, page)
        if found != 1:
            raise ValueError(f"{PAGE.name} has no place for {outcome.script}: add <!-- {outcome.script} -->")
    return page


def write_document(outcomes: Sequence[Outcome]) -> None:
    facts = hardware()
    machine = f"{facts['cpu']}, {facts['cores']} cores"
    page = with_sections(PAGE.read_text(encoding="utf-8"), outcomes, machine)
    write_whole(PAGE, page.encode())
