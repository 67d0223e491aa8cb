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


def goodput_rps(
    grown: Growth, objectives: Mapping[str, float], seconds: float, running: tuple[float, float]
) -> tuple[float, float] | None:
    """Requests per second that ended and met all objectives: at least, and at most. A histogram does not say which
    request missed two of them. Without objectives it is what the server counts by its own; None where it counts none.

    The first tokens of a window are those of other requests than ended in it. `running`, when it began and when it
    ended, bounds how many: the former had theirs before, the latter have not ended.
    """
    if seconds <= 0:
        return None
    if not objectives:
        totals = grown.totals()
        own = [
            count for name, count in totals.items() if name.startswith(OWN_COUNT) and all(each in name for each in MET)
        ]
        return (sum(own) / seconds, sum(own) / seconds) if own else None
    if not all(grown.serves(HISTOGRAMS[name]) for name in {"e2e_ms", *objectives}):
        return None
    ended = _whole(grown.below(HISTOGRAMS["e2e_ms"]))
    least, most = ended, ended
    for name, bound_ms in objectives.items():
        below = grown.below(HISTOGRAMS[name])
        low, high = shares_below(below, bound_ms / 1e3) if below else (0.0, 0.0)
        observed, (before, after) = _whole(below), running if name == "ttft_ms" else (0.0, 0.0)
        least -= ended - min(ended, max(0.0, low * observed - after))
        most = min(most, high * observed + before if name == "ttft_ms" else ended - (1 - high) * observed)
    return float(max(0.0, least)) / seconds, float(max(0.0, most)) / seconds


def good_tokens_per_s(grown: Growth, seconds: float) -> float | None:
    """By the server's own objectives; None where it counts no tokens by them."""
    total = of_family(grown.totals(), GOOD_TOKENS)
    return None if total is None or seconds <= 0 else total / seconds


def point(
    ns: int, grown: Growth, objectives: Mapping[str, float], seconds: float, running: tuple[float, float]
) -> LatencyPoint:
    between = {each.latency: each.between_ms for each in percentiles_of(grown)}
    goodput = goodput_rps(grown, objectives, seconds, running)
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
    return max(below.values(), default=0.0)
