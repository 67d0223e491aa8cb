"""`sojourn compare`: whether B is worse than A, for people and for CI."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from sojourn.commands.cli import find_run, open_run, out, print_json, program_name, table
from sojourn.metrics.compare.metrics import METRICS
from sojourn.metrics.errors import InputError, RunDataError
from sojourn.metrics.exit_codes import Ended

if TYPE_CHECKING:
    from sojourn.metrics.compare.verdict import Compared, Comparison
    from sojourn.metrics.compare.workload import Work
    from sojourn.metrics.run.directory import RunDirectory

TAKES_TWO = "compare takes two: A before and B after, each a run, a folder of runs or a file"
USUAL_MARGIN = "5%"
HITS_DIFFER = 0.05  # of the prompt tokens, between the prefix hits of A and of B
EXIT_CODES = {"no worse": Ended.DONE, "worse": Ended.FAILED, "cannot tell": Ended.CANNOT_TELL}
RunsArgument = Annotated[
    Path | None,
    typer.Argument(help="a run directory, or a folder of several; or a log, a page of /metrics or a summary"),
]


def compare(
    a: RunsArgument = None,
    b: RunsArgument = None,
    prometheus: Annotated[
        str | None, typer.Option(help="compare two periods of a server instead, as this Prometheus holds them")
    ] = None,
    before: Annotated[
        str | None, typer.Option(metavar="FROM..TO", help="with --prometheus: such as -26h..-25h")
    ] = None,
    after: Annotated[
        str | None, typer.Option(metavar="FROM..TO", help="with --prometheus: such as 09:00..09:30")
    ] = None,
    select: Annotated[
        str, typer.Option(metavar="MATCHERS", help="with --prometheus: the server, such as 'instance=\"gpu1:8000\"'")
    ] = "",
    metric: Annotated[
        list[str] | None, typer.Option(help=f"one of {', '.join(METRICS)}; repeatable; by default six of them")
    ] = None,
    margin: Annotated[
        list[str],
        typer.Option(help="how much worse B may be, as a share of A: 5% or 0.05; for one metric: steady_steps=3%"),
    ] = (USUAL_MARGIN,),
    confidence: Annotated[float, typer.Option(min=0.5, max=0.9999, help="confidence of either verdict")] = 0.95,
    max_steal: Annotated[
        str | None,
        typer.Option(help="leave out requests and steps during seconds with more CPU steal than this: 1% or 0.01"),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="compare runs that are not valid, or that differ in load, model or hardware")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print the comparison as JSON")] = False,
) -> None:
    """Say whether B is worse than A beyond a margin.

    Each of A and B is one run, or a folder of runs. Runs of the same schedule are compared pair by pair. Only several
    runs a side show how much runs differ by themselves. Of one log or file of pages, or with --before alone, it says
    when the figures changed.
    """
    from sojourn.metrics.compare.runs import NotComparable, compare_runs

    if any((prometheus, before, after, select)):
        sys.exit(_periods(a, prometheus, before, after, select, as_json=json))
    if a is not None and b is None and a.is_file():
        from sojourn.commands.compare_files import change_in_file

        sys.exit(change_in_file(a, as_json=json))
    if a is None or b is None:
        raise InputError(TAKES_TWO if a is None else _needs_two(a))
    if a.is_file() or b.is_file():  # a run beside a published row is a summary, too
        own_options = {"--metric": metric, "--max-steal": max_steal, "--margin": margin != [USUAL_MARGIN] and margin}
        if given := [name for name, value in own_options.items() if value]:
            raise InputError(f"{', '.join(given)}: means in a file cannot be judged so; compare two runs")
        from sojourn.commands.compare_files import compare_files

        sys.exit(compare_files(a, b, as_json=json))
    usual, own = _margins(margin)
    steal = None if max_steal is None else _share("--max-steal", max_steal)
    try:
        found = compare_runs(
            _runs(a), _runs(b), metrics=metric or (), margin=usual, margins=own, confidence=confidence, force=force,
            max_steal=steal,
        )  # fmt: skip
    except NotComparable as error:
        raise InputError(f"{error} with --force") from None
    except RunDataError as error:  # 1 says that B is worse
        raise InputError(str(error)) from None
    if note := _differing_hits(_runs(a), _runs(b)):
        found = msgspec.structs.replace(found, notes=[*found.notes, note])
    if json:
        print_json(found)
    else:
        _print(found)
    sys.exit(EXIT_CODES[found.verdict])


def _periods(
    a: Path | None, prometheus: str | None, before: str | None, after: str | None, select: str, *, as_json: bool
) -> int:
    """Of two periods what differs, of one when its figures changed."""
    from sojourn.commands.compare_files import change_in_period, compare_periods

    if a is not None or prometheus is None or before is None:
        raise InputError(
            "two periods take --prometheus URL --before FROM..TO --after FROM..TO, and no run; without --after it says "
            "when the figures changed within the period"
        )
    if after is None:
        return change_in_period(prometheus, before, select, as_json=as_json)
    return compare_periods(prometheus, before, after, select, as_json=as_json)


def _margins(texts: list[str]) -> tuple[float, dict[str, float]]:
    """The usual one, and those of single metrics."""
    named = [text.rpartition("=") for text in texts]
    own = {name.strip(): _share("--margin", text) for name, sign, text in named if sign}
    usual = [_share("--margin", text) for _, sign, text in named if not sign]
    if len(usual) > 1 or len(own) + len(usual) < len(texts):
        raise InputError(f"--margin {' --margin '.join(texts)}: one is given twice; give each once")
    return usual[0] if usual else _share("--margin", USUAL_MARGIN), own


def _share(option: str, text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise InputError(f"{option} is {text or 'empty'}; give a share above 0 and at most 1, such as 5% or 0.05")
    return share


def _differing_hits(a: "list[RunDirectory]", b: "list[RunDirectory]") -> str:
    """A sentence where the servers' own counters show another share of prefix hits on each side; "" elsewhere."""
    from statistics import fmean

    from sojourn.interop.sources.view import hit_rate_of_run

    sides = [[rate for run in side if (rate := hit_rate_of_run(run)) is not None] for side in (a, b)]
    if not all(sides) or abs(fmean(sides[0]) - fmean(sides[1])) < HITS_DIFFER:
        return ""
    one, other = map(fmean, sides)
    return (
        f"prefix hits differ: {one:.0%} of the prompt tokens in A and {other:.0%} in B; an earlier load of the same "
        "prompts warms the cache: restart the server before each run, or take another --seed"
    )


def _needs_two(only: Path) -> str:
    """What is missing, and the command for the two newest runs of a folder, or for the run that lies beside one."""
    from sojourn.metrics.run.listing import before_and_after, list_runs, run_beside

    found = find_run(only)
    is_run = (found / "run.json").exists()
    folder = found.resolve().parent if is_run else found
    listed = list_runs(folder) if folder.is_dir() else []
    names = [found.resolve().name] if is_run else [run.name for run in listed if not run.is_passed_over][:2]
    if is_run and (other := run_beside(listed, names[0])) is not None:
        names.append(other.name)
    if not found.exists():
        return f"{TAKES_TWO}; {only} does not exist"
    if len(names) < 2:
        return f"{TAKES_TWO}; {found} is the only one that was found"
    shown = found.parent if is_run else found
    pair = [shlex.quote(str(path)) for path in before_and_after(shown / names[0], shown / names[1])]
    return f"{TAKES_TWO}; the two that lie nearest:\n{program_name()} compare {' '.join(pair)}"


def _runs(path: Path) -> "list[RunDirectory]":
    """The run at a path, or all of a folder, by name."""
    found = find_run(path)
    if found.is_dir() and not (found / "run.json").exists():
        folders = sorted(file.parent for file in found.glob("*/run.json"))
        if not folders:
            raise InputError(f"{found} is neither a run directory nor a folder of some; give one of the two")
        return [open_run(folder) for folder in folders]
    return [open_run(found)]


def _print(found: "Comparison") -> None:
    columns = ("metric", "A", "B", "B / A", f"{found.confidence:.0%} bounds", "verdict")
    rows = table(*columns, text=["metric", "verdict"])
    for each in found.metrics:
        bounds = "–" if each.low is None else f"{_ratio(each.low)}–{_ratio(each.high)}"
        ratio = "–" if each.ratio is None else _ratio(each.ratio)
        rows.add_row(each.metric, _number(each.a), _number(each.b), ratio, bounds,
                     "better" if each.better else each.verdict)  # fmt: skip
    out.print(rows)
    if found.work is not None:
        out.print(_work(*found.work))
    by_reason: dict[str, list[str]] = {}
    for each in found.metrics:
        by_reason.setdefault(_reason(each), []).append(each.metric)
    for reason, names in by_reason.items():
        if reason:
            out.print(f"{'all metrics' if len(names) == len(found.metrics) > 1 else ', '.join(names)}: {reason}")
    for note in found.notes:
        out.print(note, markup=False)
    own = "".join(f" ({each.metric} {100 * each.margin:.3g}%)" for each in found.metrics if each.margin != found.margin)
    head = f"\n[bold]{said(found)}[/bold]: B against A, margin {100 * found.margin:.3g}%{own}, confidence "
    out.print(f"{head}{found.confidence:.0%}{surely(found)}")


def said(found: "Comparison") -> str:
    """The verdict; where nothing is worse and something better, that: a gain is more than `no worse`."""
    gains = any(each.better for each in found.metrics)
    if found.verdict == "no worse" and gains:
        return "better"
    return "better in part, cannot tell the rest" if found.verdict == "cannot tell" and gains else found.verdict


def surely(found: "Comparison") -> str:
    """`; better in ttft_mean, e2e_mean; worse in tpot_mean`."""
    better = [each.metric for each in found.metrics if each.better]
    worse = [each.metric for each in found.metrics if each.verdict == "worse"]
    return "".join(f"; {word} in {', '.join(names)}" for word, names in (("better", better), ("worse", worse)) if names)


def _work(a: "Work", b: "Work") -> str:
    """`A / B: failed 0.0% / 2.0% of 300 / 300 requests; 40.1 / 40.1 output tokens per reply; ...`."""

    def both(name: str, style: str) -> str:
        values = getattr(a, name), getattr(b, name)
        return " / ".join("–" if value is None else format(value, style) for value in values)

    return (
        f"A / B: failed {both('failed_share', '.1%')} of {both('requests', ',')} requests; "
        f"{both('output_tokens', '.4g')} output tokens per reply; {both('cached_share', '.1%')} of the prompt tokens "
        f"cached; sent {both('lag_ms', '.3g')} ms late on average"
    )


def _reason(each: "Compared") -> str:
    if each.needs is not None:
        times = max(each.needs, 1.2)
        more = f"about {times:,.{0 if times >= 10 else 1}f} times as many requests or runs would decide it"
        return f"{each.reason}; {more}" if each.reason else more
    return each.reason


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 1000 else f"{value:,.0f}" if value < 1e6 else "∞"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
