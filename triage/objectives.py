"""What a summary says of objectives: a quantile bounds the share of requests that kept one, a mean does not."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from sojourn.interop.held.held import BenchmarkFigures

QUANTILES = {"median": 0.5, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}
ALL_AT_ONCE = "how many requests kept every objective: quantiles of a summary are of one latency each; give the rows"


class Judged(NamedTuple):
    """Of one objective. `is_certain`: a share of the requests is known to lie between two bounds."""

    sentence: str
    is_certain: bool
    is_problem: bool  # less than nine of ten kept it


def judge(figures: BenchmarkFigures, bounds: Mapping[str, float]) -> Iterator[Judged]:
    """`bounds` in milliseconds, by the name of the latency."""
    for name, bound in bounds.items():
        label, own = name.removesuffix("_ms").upper(), [each for each in figures.figures if each.name == name]
        shown = sorted((QUANTILES[each.statistic], each) for each in own if each.statistic in QUANTILES)
        if not shown:
            has = "only its mean" if own else "no such latency"
            yield Judged(f"how many requests kept {label} ≤ {bound:g} ms: the summary has {has}", False, False)
            continue
        low = max((share for share, each in shown if each.value <= bound), default=0.0)
        high = min((share for share, each in shown if each.value > bound), default=1.0)
        said = ", ".join(f"{each.statistic} {each.value:,.0f} ms" for _, each in shown)
        yield Judged(
            f"{low:.0%} to {high:.0%} of the served requests kept {label} ≤ {bound:g} ms ({said})", True, high <= 0.9
        )
