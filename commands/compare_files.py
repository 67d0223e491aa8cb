"""`sojourn compare` of what is no run: logs, pages of /metrics, summaries, or two periods of a Prometheus."""

from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from sojourn.commands.cli import out, print_json, table
from sojourn.metrics.errors import InputError
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.interop.held.differences import Differences
    from sojourn.interop.held.held import Held

EXIT_CODES = {
    "worse": Ended.FAILED, "better": Ended.DONE, "no clear change": Ended.DONE, "cannot tell": Ended.CANNOT_TELL,
}  # fmt: skip
NO_INTERVAL = (
    "Means of whole files have no interval: a fifth counts as a change. Runs with requests are judged exactly."
)


def compare_files(a: Path, b: Path, *, as_json: bool) -> int:
    return _compare(_one(a), _one(b), as_json)


def compare_periods(prometheus: str, before: str, after: str, select: str, *, as_json: bool) -> int:
    """Two periods of one server, as a Prometheus holds them."""
    from datetime import datetime

    from sojourn.live.watch.fetch import base_of
    from sojourn.live.watch.period import held_in, read_period

    now, base = datetime.now().astimezone(), base_of(prometheus)
    first, second = (held_in(base, read_period(text, now), select) for text in (before, after))
    return _compare(first, second, as_json)


def _compare(a: "Held", b: "Held", as_json: bool) -> int:
    from sojourn.interop.held.differences import differences

    found = differences(a, _since(a, b))
    if as_json:
        print_json(found)
    else:
        _print(found)
    return EXIT_CODES[found.verdict]


def _since(a: "Held", b: "Held") -> "Held":
    """Of two pages of one process what lies between them: the later page's sums hold those of the earlier one."""
    import msgspec

    from sojourn.interop.held.logs.pages import between, is_continued

    figures = between(a, b) if is_continued(a, b) else None
    return b if figures is None else msgspec.structs.replace(b, figures=figures)


def _one(path: Path) -> "Held":
    """The evidence in a file; of several pages of one server what lies between the first and the last."""
    import msgspec

    from sojourn.interop.held.logs.pages import TOOL, between
    from sojourn.interop.held.registry import read_file

    found = read_file(path)
    held = [each for each in found if each.figures is not None] or found  # flags beside a log are in it, too
    if len(held) > 1 and all(each.kind == TOOL for each in held):
        figures = between(held[0], held[-1])
        if figures is None:
            raise InputError(f"{path} holds pages of several servers; give a file of one")
        return msgspec.structs.replace(held[-1], figures=figures)
    if len(held) > 1:
        raise InputError(f"{path} holds {len(held)} pieces of evidence; give a file with one")
    return held[0]


def _print(found: "Differences") -> None:
    if found.settings:
        rows = table("setting", "A", "B", text=["setting", "A", "B"])
        for change in found.settings:
            rows.add_row(change.name, str(change.before), str(change.after))
        out.print(rows)
        out.print()
    rows = table("figure", "unit", "A", "B", "B / A", text=["figure", "unit"])
    for each in found.figures:
        ratio = "–" if each.ratio is None else f"{each.ratio:.3g}"
        name = each.name if each.statistic == "mean" else f"{each.name} {each.statistic}"
        rows.add_row(name, each.unit, _number(each.before), _number(each.after), ratio)
    out.print(rows)
    for sentence in (*found.explained, *found.notes, NO_INTERVAL):
        out.print(sentence, markup=False)
    verdict, _, rest = found.headline.partition(": ")
    out.print(f"\n[bold]{verdict}[/bold]{f': {escape(rest)}' if rest else ''}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
