"""What a log's lines say of an engine, as rows of the table `scrapes`.

A line that says a rate is integrated to the counter that grew by it. What grows between two lines is known at their
ends only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from sojourn.interop.held.held import BenchmarkFigures, Figure

TOGETHER_S = 0.4  # of the usual interval: lines of several engines so near are one look
LATE = 1.6  # times the usual interval: beyond it lines are missing, or the server was silent


@dataclass(frozen=True, slots=True)
class Said:
    """One line of one engine. Names are those of the server's own /metrics."""

    ns: int
    line: int
    owner: tuple[tuple[str, str], ...]  # labels of the engine
    gauges: dict[str, float]
    rates: dict[str, float] = field(default_factory=dict)  # counter → per second, since the engine's line before
    gains: dict[str, float] = field(default_factory=dict)  # counter → since the engine's line before
    begins: bool = False  # the process began anew before this line


def figures_of(
    tool: str, clock: str, columns: Mapping[str, tuple[str, Sequence[float]]], most: str = "last"
) -> BenchmarkFigures | None:
    """Name → unit and values, as mean, largest and `most`; None where there is none."""
    statistics = {"mean": fmean, "max": max, "median": median, "last": lambda values: values[-1]}
    figures = [
        Figure(name=name, statistic=statistic, value=float(statistics[statistic](values)), unit=unit, clock=clock)
        for name, (unit, values) in columns.items()
        if values
        for statistic in ("mean", "max", most)
    ]
    return BenchmarkFigures(tool=tool, figures=figures) if figures else None


def usual_interval_s(lines: Sequence[Said], otherwise: float) -> float:
    """Between two lines of one engine, where none is missing."""
    gaps, last = [], {}
    for each in lines:
        before = last.get(each.owner)
        if before is not None and each.ns > before:
            gaps.append((each.ns - before) / 1e9)
        last[each.owner] = each.ns
    return sorted(gaps)[len(gaps) // 4] if gaps else otherwise


def rows_of(lines: Sequence[Said], interval_s: float, rates_over_gaps: bool) -> list[dict[str, Any]]:
    """`ns, name, labels, value`, in order of time. `rates_over_gaps`: whether a rate is over all the time since the
    engine's line before, however long; else it is over the usual interval at most."""
    counters: dict[tuple, dict[str, float]] = {}
    last: dict[tuple, Said] = {}
    looks: list[tuple[int, dict[tuple, dict[str, float]]]] = []
    for each in sorted(lines, key=lambda said: (said.ns, said.line)):
        before = last.get(each.owner)
        if each.begins:
            counters.pop(each.owner, None)
            before = None
        held = counters.setdefault(each.owner, dict.fromkeys((*each.rates, *each.gains), 0.0))
        gap_s = interval_s if before is None else (each.ns - before.ns) / 1e9
        was_idle = before is not None and not any(before.rates.values())
        over_s = gap_s if rates_over_gaps or (gap_s > LATE * interval_s and not was_idle) else min(gap_s, interval_s)
        for name, rate in each.rates.items():
            held[name] = held.get(name, 0.0) + rate * over_s
        for name, gain in each.gains.items():
            held[name] = held.get(name, 0.0) + gain
        last[each.owner] = each
        shown = each.gauges | held
        apart_ns = each.ns - looks[-1][0] if looks else -1
        near = 0 <= apart_ns <= TOGETHER_S * interval_s * 1e9 and each.owner not in looks[-1][1]
        if near or apart_ns == 0:
            looks[-1][1][each.owner] = shown
        else:
            looks.append((each.ns, {each.owner: shown}))
    return [
        {"ns": ns, "name": name, "labels": list(owner), "value": value}
        for ns, look in looks
        for owner, shown in look.items()
        for name, value in shown.items()
    ]


def late_gaps(lines: Sequence[Said], interval_s: float) -> list[tuple[Said, Said]]:
    """Two lines of one engine, far apart, the first of which shows load."""
    found, last = [], {}
    for each in sorted(lines, key=lambda said: (said.ns, said.line)):
        before = last.get(each.owner)
        if (
            before is not None
            and not each.begins
            and each.ns - before.ns > LATE * interval_s * 1e9
            and any(before.rates.values())
        ):
            found.append((before, each))
        last[each.owner] = each
    return found
