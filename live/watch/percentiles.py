"""Percentiles and goodput of a watched server, as its histograms know them: between two bounds of their buckets."""

from collections.abc import Mapping
from dataclasses import dataclass

from sojourn.interop.sources.pressure import GAPS
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import Growth, of_family, quantile_bounds
from sojourn.live.watch.document import Percentiles
from sojourn.live.watch.expectation import HISTOGRAMS, OWN_COUNT, shares_below

LATENCIES = {
    "TTFT": HISTOGRAMS["ttft_ms"], "TPOT": HISTOGRAMS["tpot_ms"], "ITL": GAPS, "queue": "sojourn_request_queue_seconds",
}  # fmt: skip
QUANTILES = (0.5, 0.9, 0.99)
MET = ('objective="all_objectives"', 'outcome="met"')
GOOD_TOKENS = "sojourn_token_good_tokens_total"
POINT_S, OVER_S = 5.0, 15.0  # a point of the history, and the time that it covers

Bounds = tuple[float, float | None]  # above, at most; None: above the last bound of the server's buckets


@dataclass(frozen=True, slots=True)
class LatencyPoint:
    """The last OVER_S before a scrape."""

    ns: int
    between_ms: dict[str, dict[str, Bounds]]  # latency → "p50" → bounds
    goodput_rps: tuple[float, float] | None
    good_tokens_per_s: float | None


def percentiles_of(grown: Growth) -> list[Percentiles]:
    """Of each latency that the server has buckets of, and that was observed."""
    found = []
    for name, family in LATENCIES.items():
        below, known = grown.below(family), grown.distribution_of(family)
        if below and known is not None:
            between = {
                place: (1e3 * low, None if high is None else 1e3 * high)
                for place, (low, high) in quantile_bounds(below, known.count, QUANTILES).items()
            }
            found.append(
                Percentiles(latency=name, samples=round(known.count), mean_ms=1e3 * known.mean, between_ms=between)
            )
    return found


def goodput_rps(grown: Growth, objectives: Mapping[str, float], seconds: float) -> tuple[float, float] | None:
    """Requests per second that met all objectives: at least, and at most. A histogram does not say which request missed
    two of them. Without objectives it is what the server counts by its own; None where it counts none."""
    if not objectives:
        totals = grown.totals()
        met = ('objective="all_objectives"', 'outcome="met"')
        own = [
            count for name, count in totals.items() if name.startswith(OWN_COUNT) and all(each in name for each in met)
        ]
        return (sum(own) / seconds, sum(own) / seconds) if own and seconds > 0 else None
    missed: list[tuple[float, float]] = []
    ended = max((grown.below(HISTOGRAMS[name]) or {0.0: 0.0} for name in ("e2e_ms", "ttft_ms")), key=_whole)
    for name, bound_ms in objectives.items():
        below = grown.below(HISTOGRAMS[name])
        if not below and not grown.serves(HISTOGRAMS[name]):
            return None
        if below:
            low, high = shares_below(below, bound_ms / 1e3)
            missed.append(((1 - high) * _whole(below), (1 - low) * _whole(below)))
    if seconds <= 0:
        return None
    most = _whole(ended) - max((least for least, _ in missed), default=0.0)
    fewest = _whole(ended) - sum(greatest for _, greatest in missed)
    return max(0.0, fewest) / seconds, max(0.0, most) / seconds


def good_tokens_per_s(grown: Growth, seconds: float) -> float | None:
    """By the server's own objectives; None where it counts no tokens by them."""
    total = of_family(grown.totals(), GOOD_TOKENS)
    return None if total is None or seconds <= 0 else total / seconds


def point(ns: int, grown: Growth, objectives: Mapping[str, float], seconds: float) -> LatencyPoint:
    between = {each.latency: each.between_ms for each in percentiles_of(grown)}
    goodput = goodput_rps(grown, objectives, seconds)
    return LatencyPoint(ns, between, goodput, good_tokens_per_s(grown, seconds))


def names_read(source: Source) -> set[str]:
    """The series that a point is made of."""
    families = {*LATENCIES.values(), *HISTOGRAMS.values()}
    counters = {OWN_COUNT, GOOD_TOKENS}
    found: set[str] = set()
    for item in source.translations:
        suffixes = ("_bucket", "_sum", "_count") if item.ours in families else ("",) if item.ours in counters else ()
        found |= {f"{term.name}{suffix}" for terms in item.theirs for term in terms for suffix in suffixes}
    return found


def _whole(below: Mapping[float, float]) -> float:
    return max(below.values())
