"""The tables of the comparison: one row a pair, and what share of the pairs keeps each bound."""

import datetime
import math
import statistics
from collections.abc import Iterable, Sequence

from bench.replay.compare import Compared, Figure
from bench.replay.pairs import label
from sojourn.metrics.machine.host import hardware

BOUNDS = {"tpot": 0.05, "e2e": 0.06, "ttft": 0.10, "attainment": 0.05}
NAMES = {"tpot": "TPOT p50", "e2e": "E2E p50", "ttft": "TTFT p50", "attainment": "attainment"}


def summary(compared: Sequence[Compared]) -> str:
    lines = []
    for each in compared:
        lines.append(
            f"{each.workload:22s} {label(each.settings)}  preempted {each.preemptions}  steps "
            f"{_steps(each)}  {each.seconds:.1f} s"
        )
        lines += [f"    {key} {_cell(key, figure)}" for key, figure in each.figures.items()]
        lines += [f"    ! {doubt}" for doubt in each.doubts]
    return "\n".join([*lines, "", *("; ".join(row) for row in totals(compared))])


def markdown(compared: Sequence[Compared], command: str) -> str:
    machine = hardware()
    workloads = {each.workload for each in compared}
    repeats = sorted({each.repeats for each in compared})
    rows = [
        "| run | change | " + " | ".join(NAMES.values()) + " | preemptions | steps |", "|---|---|" + "---|" * 6,
    ]  # fmt: skip
    for each in compared:
        cells = [_cell(key, figure) for key, figure in each.figures.items()]
        mark = " !" if each.doubts else ""
        base, said, was = each.preemptions
        rows.append(
            f"| {each.workload} | `{label(each.settings)}`{mark} | {' | '.join(cells)} | {base} → {said}; {was} | "
            f"{_steps(each)} |"
        )
    doubts = [f"- {each.workload}, `{label(each.settings)}`: {doubt}" for each in compared for doubt in each.doubts]
    return "\n".join(
        [
            "# How well a replay predicts",
            "",
            "This page answers: how near does `sojourn replay` come to a run of the changed setting?",
            "",
            f"Command: `{command}`. {datetime.date.today():%d %B %Y}, {machine.get('cpu')}, {machine.get('cores')} "
            "cores, bundled model.",
            "",
            f"{len(compared)} pairs over {len(workloads)} kinds of runs. Each run is replayed with the change. Another "
            "run had that change, with the same arrivals. Each figure is the median of "
            f"{' or '.join(map(str, repeats))} such pairs of runs.",
            "",
            "| figure | largest error that is good | pairs within it | median error | ... at the device speed of the "
            "changed run | outcomes in their interval | right signs | median spread |",
            "|---|---|---|---|---|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in totals(compared)),
            "",
            "An interval is to hold 80% of the outcomes. Signs count where a change exceeds its spread.",
            "",
            "A cell reads: without the change → predicted (80% interval); measured with it; **error**; spread of the "
            "change.",
            "That spread is the width of the interval of the run replayed unchanged, where each run has no repeat.",
            "Latencies are ms. The error and the spread of attainment are percentage points. A pair with `!` was "
            "predicted with a doubt. The column `steps` says how much slower the device was in the changed run than "
            "the step model says. Its first figure is of sizes of steps that both have: the machine. The second is of "
            "larger ones.",
            "",
            *rows,
            *(["", "Doubts that the replay itself stated:", "", *doubts] if doubts else []),
            "",
        ]
    )


def totals(compared: Sequence[Compared]) -> list[list[str]]:
    """A row for each figure, in the columns of the page."""
    rows = []
    for key, bound in BOUNDS.items():
        found = [each.figures[key] for each in compared]
        errors = [abs(figure.error) for figure in found]
        at_its_speed = [abs(figure.error_at_its_speed) for figure in found]
        signs = [figure.has_right_sign for figure in found if figure.has_right_sign is not None]
        unit = " points" if key == "attainment" else "%"

        def share(errors: list[float], bound: float = bound) -> str:
            return f"{sum(error <= bound for error in errors)} of {len(errors)}"

        def median(values: Iterable[float], unit: str = unit) -> str:
            return f"{100 * statistics.median(values):.1f}{unit}"

        inside, outcomes = sum(figure.inside for figure in found), sum(len(figure.outcomes) for figure in found)
        rows.append([
            NAMES[key], f"{100 * bound:.0f}{unit}", share(errors), median(errors),
            f"{median(at_its_speed)}, {share(at_its_speed)}", f"{inside} of {outcomes}",
            f"{sum(signs)} of {len(signs)}", median(figure.spread for figure in found),
        ])  # fmt: skip
    return rows


def _cell(key: str, figure: Figure) -> str:
    base, predicted, low, high, measured = (
        _shown(key, figure.median(name)) for name in ("base", "predicted", "low", "high", "measured")
    )
    unit = "" if key == "attainment" else "%"
    return (
        f"{base} → {predicted} ({low} to {high}); {measured}; **{100 * figure.error:+.1f}{unit}**; "
        f"{100 * figure.spread:.1f}{unit}"
    )


def _steps(each: Compared) -> str:
    beyond = "" if math.isnan(each.beyond) else f"; {100 * each.beyond:+.1f}%"
    return f"{100 * each.speed:+.1f}%{beyond}"


def _shown(key: str, value: float) -> str:
    return f"{value:.0%}" if key == "attainment" else f"{value:.3g}" if value < 100 else f"{value:,.0f}"
