"""`sojourn compare` of what is no run: logs, pages of /metrics, summaries, or two periods of a Prometheus; and of a run
beside one of them."""

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.markup import escape

from sojourn.commands.cli import open_run, out, print_json, table
from sojourn.metrics.errors import InputError, ServerError
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.interop.held.courses import Changed, Course
    from sojourn.interop.held.differences import Differences
    from sojourn.interop.held.held import Held

EXIT_CODES = {
    "worse": Ended.FAILED, "better": Ended.DONE, "no clear change": Ended.DONE, "cannot tell": Ended.CANNOT_TELL,
}  # fmt: skip
NO_INTERVAL = (
    "Without a range, a mean is of too few moments, and a fifth counts as a change. Runs with requests are judged "
    "exactly."
)


class Side(NamedTuple):
    evidence: "Held"
    courses: "list[Course]"  # of a log, of many pages, or of a period
    is_one_look: bool  # so that sums of a page are those since the server's start
    dated: bool
    within: list[str]  # sentences: what else changed meanwhile


def compare_files(a: Path, b: Path, *, as_json: bool) -> int:
    return _compare(_one(a), _one(b), as_json)


def compare_periods(prometheus: str, before: str, after: str, select: str, *, as_json: bool) -> int:
    """Two periods of one server, as a Prometheus holds them."""
    return _compare(_period(prometheus, before, select), _period(prometheus, after, select), as_json)


def change_in_file(path: Path, *, as_json: bool) -> int:
    """When the figures of one log, or of one file of pages, changed."""
    return _change(str(path), _one(path), as_json)


def change_in_period(prometheus: str, period: str, select: str, *, as_json: bool) -> int:
    return _change(period, _period(prometheus, period, select), as_json)


def _period(prometheus: str, text: str, select: str) -> Side:
    from datetime import datetime

    from sojourn.live.watch.fetch import base_of
    from sojourn.live.watch.period import held_in, read_period

    period = read_period(text, datetime.now().astimezone())
    try:
        found = held_in(base_of(prometheus), period, select)
    except ServerError as error:  # 1 says that B is worse
        raise InputError(f"{error}; give --prometheus the address of a Prometheus that scrapes the server") from None
    return _side(found, [found])


def _side(evidence: "Held", pieces: "list[Held]") -> Side:
    from sojourn.interop.held.courses import courses_of, dated, looks_in
    from sojourn.interop.held.within import changes_within

    looks = looks_in(pieces)
    is_dated = dated(looks)
    return Side(evidence, courses_of(looks), len(looks) < 2, is_dated, changes_within(looks, is_dated))


def _compare(a: Side, b: Side, as_json: bool) -> int:
    import msgspec

    from sojourn.interop.held.courses import bounds_of
    from sojourn.interop.held.differences import differences

    evidence = _since(a.evidence, b.evidence) if b.is_one_look else b.evidence
    found = differences(a.evidence, evidence, bounds_of(a.courses, b.courses))
    notes = [f"within {name}, {sentence}" for name, side in (("A", a), ("B", b)) for sentence in side.within]
    found = msgspec.structs.replace(found, notes=[*found.notes, *notes])
    if as_json:
        print_json(found)
    else:
        _print(found)
    return EXIT_CODES[found.verdict]


def _change(name: str, side: Side, as_json: bool) -> int:
    from sojourn.interop.held.courses import FEWEST_TO_CHANGE, Changes, change_points

    most = max((len(each.values) for each in side.courses), default=0)
    if most < FEWEST_TO_CHANGE:
        raise InputError(
            f"{name} is one side, and too few moments to look for a change in: {most} windows, and at least "
            f"{FEWEST_TO_CHANGE} are needed. Give a second file, or a longer log"
        )
    changes = change_points(side.courses)
    if as_json:
        print_json(Changes(changes=changes, within=side.within))
    else:
        _print_changes(changes, side, most)
        for sentence in side.within:
            out.print(sentence, markup=False)
    latencies = [each for each in changes if each.name.endswith("_ms")]
    return Ended.FAILED if any(each.after > each.before for each in latencies) else Ended.DONE


def _print_changes(changes: "list[Changed]", side: Side, most: int) -> None:
    if not changes:
        names = ", ".join(each.name for each in side.courses)
        out.print(f"looked at, in {most} windows: {names}", markup=False)
        out.print("\n[bold]no change point[/bold]: no mean changed for good beyond what these series do by themselves")
        return
    rows = table("figure", "unit", "before", "after", "after / before", "between", text=["figure", "unit", "between"])
    for each in changes:
        ratio = f"{each.after / each.before:.3g}" if each.before > 0 else "–"
        rows.add_row(
            each.name,
            each.unit,
            _number(each.before),
            _number(each.after),
            ratio,
            _moment(each, side.dated, "%H:%M:%S"),
        )
    out.print(rows)
    first = min(changes, key=lambda each: (not each.name.endswith("_ms"), -each.statistic))
    moved = f"{first.name} {_number(first.before)} → {_number(first.after)} {first.unit}"
    out.print(f"\n[bold]changed[/bold] {escape(_moment(first, side.dated))}: {escape(moved)}")


def _moment(change: "Changed", is_dated: bool, form: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Between which two moments; of pages without one, between which of them."""
    from datetime import UTC, datetime

    if not is_dated:
        return "between pages without a moment"
    begin, end = (datetime.fromtimestamp(each / 1e9, UTC) for each in (change.begin_ns, change.end_ns))
    return f"{begin:{form}} – {end:%H:%M:%S} UTC"


def _since(a: "Held", b: "Held") -> "Held":
    """Of two pages of one process what lies between them: the later page's sums hold those of the earlier one."""
    import msgspec

    from sojourn.interop.held.logs.pages import between, is_continued

    figures = between(a, b) if is_continued(a, b) else None
    return b if figures is None else msgspec.structs.replace(b, figures=figures)


def _one(path: Path) -> Side:
    """The evidence in a file; of several pages of one server what lies between the first and the last. A run is what
    its summary would say."""
    if path.is_dir():
        return _side(held := _summary_of(path), [held])
    import msgspec

    from sojourn.interop.held.logs.pages import TOOL, between
    from sojourn.interop.held.registry import read_file

    found = read_file(path)
    held = [each for each in found if each.figures is not None] or found  # flags beside a log are in it, too
    if len(held) > 1 and all(each.kind == TOOL for each in held):
        figures = between(held[0], held[-1])
        if figures is None:
            raise InputError(f"{path} holds pages of several servers; give a file of one")
        return _side(msgspec.structs.replace(held[-1], figures=figures), held)
    if len(held) > 1:
        raise InputError(f"{path} holds {len(held)} pieces of evidence; give a file with one")
    return _side(held[0], held)


def _summary_of(path: Path) -> "Held":
    """A run as the summary of `vllm bench serve`, with the axes of published rows where it knows its devices: output
    tokens per second of one GPU, and of one user."""
    import json

    from sojourn.commands.export import vllm_document
    from sojourn.interop.exported.inferencex_row import axes
    from sojourn.interop.held.registry import read_held

    run = open_run(path)
    document = vllm_document(run, detailed=False)
    return read_held(json.dumps(document | axes(document, run.meta())), str(path))[0]


def _print(found: "Differences") -> None:
    if found.settings:
        rows = table("setting", "A", "B", text=["setting", "A", "B"])
        for change in found.settings:
            rows.add_row(change.name, str(change.before), str(change.after))
        out.print(rows)
        out.print()
    rows = table("figure", "unit", "A", "B", "B / A", "95% range", text=["figure", "unit"])
    for each in found.figures:
        ratio = "–" if each.ratio is None else f"{each.ratio:.3g}"
        name = each.name if each.statistic == "mean" else f"{each.name} {each.statistic}"
        bounds = "–" if each.bounds is None else f"{each.bounds[0]:.3g}–{each.bounds[1]:.3g}"
        rows.add_row(name, each.unit, _number(each.before), _number(each.after), ratio, bounds)
    out.print(rows)
    without = [NO_INTERVAL] if any(each.bounds is None for each in found.figures) else []
    for sentence in (*found.explained, *found.notes, *without):
        out.print(sentence, markup=False)
    verdict, _, rest = found.headline.partition(": ")
    out.print(f"\n[bold]{verdict}[/bold]{f': {escape(rest)}' if rest else ''}")


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
