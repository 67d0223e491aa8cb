"""Several benchmarks of one tool as a sweep: where more load gave no more throughput."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from sojourn.interop.held.held import BenchmarkFigures, Held
from sojourn.interop.imported.result import number

LESS_GAIN, MORE_LOAD, SLOWER = 0.15, 1.4, 1.3  # a knee: so little throughput for so much load, at so much latency


class Knee(NamedTuple):
    sentence: str
    evidence: str
    source: str


def knee(held: Sequence[Held]) -> Knee | None:
    """The first step of load that gave no throughput; None where the benchmarks are no sweep, or show none."""
    by_tool: dict[tuple[str, str], list[tuple[float, BenchmarkFigures, str]]] = {}
    for each in held:
        if each.figures is not None and (step := _load(each.figures)) is not None:
            group = (each.figures.tool, str(each.settings.get("model", "")))
            by_tool.setdefault(group, []).append((step[1], each.figures, step[0]))
    for points in by_tool.values():
        found = _knee(sorted(points, key=lambda point: point[0]), held)
        if found is not None:
            return found
    return None


def _load(figures: BenchmarkFigures) -> tuple[str, float] | None:
    limit, rate = number(figures.load.get("max_concurrency")), number(figures.load.get("request_rate"))
    if rate:
        return "requests/s", float(rate)
    return ("concurrency", float(limit)) if limit else None


Point = tuple[float, BenchmarkFigures, str]


def _knee(points: Sequence[Point], held: Sequence[Held]) -> Knee | None:
    if len(points) < 3 or len({unit for *_, unit in points}) > 1 or not _same_lengths(points):
        return None
    for place, (before, after) in enumerate(pairwise(points)):
        rates = [_rate(figures) for _, figures, _ in points[place:]]
        if after[0] >= MORE_LOAD * before[0] and rates[0] and _gains_nothing(rates) and _slower(before, after):
            return _sentence(before, after, held)
    return None


def _gains_nothing(rates: Sequence[float]) -> bool:
    """The next step gains little, and no later one gains much."""
    return rates[1] < (1 + LESS_GAIN) * rates[0] and max(rates[1:]) < (1 + 2 * LESS_GAIN) * rates[0] and min(rates) > 0


def _slower(before: Point, after: Point) -> bool:
    fast, slow = _e2e(before[1]), _e2e(after[1])
    return bool(fast and slow and slow > SLOWER * fast)


def _sentence(before: Point, after: Point, held: Sequence[Held]) -> Knee:
    (low, first, unit), (high, second, _) = before, after
    was, now, fast, slow = _rate(first), _rate(second), _e2e(first), _e2e(second)
    load = f"{low:g} to {high:g} {unit}" if unit == "requests/s" else f"concurrency {low:g} to {high:g}"
    gain = f"output grows by {now / was - 1:.0%}" if now >= was else f"output falls by {1 - now / was:.0%}"
    return Knee(
        f"From {load}, {gain}, and E2E grows by {slow / fast - 1:.0%}: saturated there",
        f"{was:,.0f} to {now:,.0f} tokens/s, E2E {fast / 1e3:,.2f} to {slow / 1e3:,.2f} s",
        next(each.name for each in held if each.figures is second),
    )  # fmt: skip


def _rate(figures: BenchmarkFigures) -> float:
    return figures.value("output_tokens_per_s", "rate") or 0.0


def _e2e(figures: BenchmarkFigures) -> float:
    return figures.value("e2e_ms") or figures.value("e2e_ms", "median") or 0.0


def _same_lengths(points: Sequence[Point]) -> bool:
    """Whether all have answers of like length, where that is known: else throughput is of another work."""
    known = [mean for _, figures, _ in points if (mean := _length(figures))]
    return not known or max(known) < 1.5 * min(known)


def _length(figures: BenchmarkFigures) -> float | None:
    total, made = figures.value("output_tokens", "total"), figures.value("succeeded", "total")
    return figures.value("output_tokens") or (total / made if total and made else None)
