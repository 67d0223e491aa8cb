"""The tables of the comparison: one row a pair, and what share of the pairs keeps each bound."""

import datetime
import statistics
from collections.abc import Sequence

from bench.replay.compare import Compared
from bench.replay.pairs import label
from metrics.machine.host import hardware

BOUNDS = {"tpot": 0.05, "e2e": 0.06, "ttft": 0.10, "attainment": 0.05}
NAMES = {"tpot": "TPOT p50", "e2e": "E2E p50", "ttft": "TTFT p50", "attainment": "attainment"}


def summary(compared: Sequence[Compared]) -> str:
    lines = []
    for each in compared:
        words = [
            f"{key} {_shown(key, f.base)}→{_shown(key, f.predicted)} ({_shown(key, f.low)}–{_shown(key, f.high)}), was "
            f"{_shown(key, f.measured)} {_error(key, each)} ±{_spread(key, f.spread)}"
            for key, f in each.figures.items()
        ]  # fmt: skip
        lines.append(f"{each.workload:22s} {label(each.settings)}  preempted {each.preemptions}  {each.seconds:.1f} s")
        lines += [f"    {word}" for word in words] + [f"    ! {doubt}" for doubt in each.doubts]
    return "\n".join([*lines, "", *_totals(compared)])


def markdown(compared: Sequence[Compared], command: str) -> str:
    machine = hardware()
    workloads = {each.workload for each in compared}
    rows = ["| workload | change | " + " | ".join(NAMES.values()) + " | preemptions |", "|---|---|" + "---|" * 5]
    for each in compared:
        cells = [
            f"{_shown(key, f.base)} → {_shown(key, f.predicted)} ({_shown(key, f.low)} to {_shown(key, f.high)}); "
            f"{_shown(key, f.measured)}; **{_error(key, each)}**; {_spread(key, f.spread)}"
            for key, f in each.figures.items()
        ]  # fmt: skip
        mark = " !" if each.doubts else ""
        base, said, was = each.preemptions
        rows.append(
            f"| {each.workload} | `{label(each.settings)}`{mark} | {' | '.join(cells)} | {base} → {said}; {was} |"
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
            f"{len(compared)} pairs over {len(workloads)} workloads. Of each pair a run without the change is replayed "
            "with it. Then the change is run. Each figure is the median of "
            f"{min(each.repeats for each in compared)} such runs.",
            "",
            *(f"- {line}" for line in _totals(compared)),
            "",
            "A cell reads: base → predicted (80 % interval); measured; **error**; spread of repeats of one setting.",
            "Latencies are ms. The error and the spread of attainment are percentage points. A pair with `!` was "
            "predicted with a doubt.",
            "",
            *rows,
            *(["", "Doubts that the replay itself stated:", "", *doubts] if doubts else []),
            "",
        ]
    )


def _totals(compared: Sequence[Compared]) -> list[str]:
    lines = []
    for key, bound in BOUNDS.items():
        found = [each.figures[key] for each in compared]
        errors = [abs(f.predicted - f.measured) if key == "attainment" else abs(f.error) for f in found]
        inside = sum(error <= bound for error in errors)
        in_interval = sum(f.is_inside for f in found)
        signs = [sign for f in found if (sign := f.has_right_sign(key != "attainment")) is not None]
        unit = " points" if key == "attainment" else " %"
        lines.append(
            f"{NAMES[key]}: error at most {100 * bound:.0f}{unit} in {inside} of {len(found)} pairs, median "
            f"{100 * statistics.median(errors):.1f}{unit}; within the interval in {in_interval}; sign right in "
            f"{sum(signs)} of the {len(signs)} pairs whose change exceeds the spread of repeats; that spread is "
            f"{100 * statistics.median(f.spread for f in found):.1f}{unit} in the median."
        )
    return lines


def _shown(key: str, value: float) -> str:
    return f"{value:.0%}" if key == "attainment" else f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _error(key: str, each: Compared) -> str:
    figure = each.figures[key]
    return f"{100 * (figure.predicted - figure.measured if key == 'attainment' else figure.error):+.1f}" + (
        "" if key == "attainment" else " %"
    )


def _spread(key: str, spread: float) -> str:
    return f"{100 * spread:.1f}" + ("" if key == "attainment" else " %")
