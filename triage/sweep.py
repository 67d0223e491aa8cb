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


def _knee(points: list[tuple[float, BenchmarkFigures, str]], held: Sequence[Held]) -> Knee | None:
    if len(points) < 3 or len({unit for *_, unit in points}) > 1 or not _same_lengths(points):
        return None
    for (low, before, unit), (high, after, _) in pairwise(points):
        was, now = (each.value("output_tokens_per_s", "rate") for each in (before, after))
        fast, slow = (each.value("e2e_ms") or each.value("e2e_ms", "median") for each in (before, after))
        if not was or not now or not fast or not slow or high < MORE_LOAD * low:
            continue
        if now < (1 + LESS_GAIN) * was and slow > SLOWER * fast:
            load = f"{low:g} to {high:g} {unit}" if unit == "requests/s" else f"concurrency {low:g} to {high:g}"
            name = next(each.name for each in held if each.figures is after)
            return Knee(
                f"From {load}, output grows by {now / was - 1:.0%} and E2E by {slow / fast - 1:.0%}: saturated there",
                f"{was:,.0f} to {now:,.0f} tokens/s, E2E {fast / 1e3:,.2f} to {slow / 1e3:,.2f} s", name,
            )  # fmt: skip
    return None


def _same_lengths(points: Sequence[tuple[float, BenchmarkFigures, str]]) -> bool:
    """Whether all have answers of like length, where that is known: else throughput is of another work."""
    known = [mean for _, figures, _ in points if (mean := _length(figures))]
    return not known or max(known) < 1.5 * min(known)


def _length(figures: BenchmarkFigures) -> float | None:
    total, made = figures.value("output_tokens", "total"), figures.value("succeeded", "total")
    return figures.value("output_tokens") or (total / made if total and made else None)
