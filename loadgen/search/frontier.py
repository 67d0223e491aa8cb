"""The largest rate that keeps the objectives: DistServe's goodput (OSDI 2024), from runs at several rates. Pure.

vLLM's `request_goodput` is something else: the good requests per second of one run, whatever its rate.
"""

from collections.abc import Sequence

import msgspec

REQUIRED_SHARE = 0.90  # of the sent requests: DistServe's bound


class RatePoint(msgspec.Struct, frozen=True):
    """What came of offering a rate: the share of the sent requests that kept every objective, with its 95% bounds."""

    rate_rps: float
    share: float
    samples: float  # independent requests that say as much
    low: float
    high: float
    growing: bool = False  # latencies grew to the end: a longer run would have kept less


class MaxRate(msgspec.Struct, frozen=True, kw_only=True):
    """Where attainment falls below `share`. `low_rps` and `high_rps` bracket it with 95% confidence each, as far as
    the offered rates tell; `resolved` when both are known, `reason` says what is missing when not."""

    share: float
    rate_rps: float | None  # the estimate; None where no rate kept the share
    at_edge: bool = False  # it is the largest rate that was offered: the share may be kept further on
    low_rps: float | None  # the largest rate that met it with confidence
    high_rps: float | None  # the smallest rate above that failed it with confidence
    resolved: bool
    reason: str


def max_rate(points: Sequence[RatePoint], share: float = REQUIRED_SHARE) -> MaxRate:
    """The largest rate at which at least `share` of the sent requests were good. One whose latencies still grew can
    miss the share, but not keep it.

    Attainment cannot rise with the rate: points that say so differ by chance, and are pooled with their neighbours
    (isotonic regression). Between the last rate that keeps the share and the first that does not, it is interpolated.
    """
    known = sorted((point for point in points if point.samples), key=lambda point: point.rate_rps)
    if not known:
        return MaxRate(share=share, rate_rps=None, low_rps=None, high_rps=None, resolved=False,
                       reason="no request was sent at any rate")  # fmt: skip
    usable = [point for point in known if point.share < share or not point.growing]
    rate = _crossing([point.rate_rps for point in usable], _falling(usable), share)
    high = next((point.rate_rps for point in known if point.high < share), None)
    meets = [point.rate_rps for point in known if point.low >= share and not point.growing]
    low = max((rate for rate in meets if high is None or rate < high), default=None)
    return MaxRate(
        share=share, rate_rps=rate, at_edge=rate == known[-1].rate_rps, low_rps=low, high_rps=high,
        resolved=low is not None and high is not None, reason=_what_is_missing(known, usable, share, low, high),
    )  # fmt: skip


def _what_is_missing(
    known: list[RatePoint], usable: list[RatePoint], share: float, low: float | None, high: float | None
) -> str:
    """Why the bracket is not complete; "" where it is."""
    if low is None:
        reason = _why_none_is_sure(known, usable, share, high)
    elif high is None:
        reason = (
            f"no tested rate fails {share:.0%}: offer more than {known[-1].rate_rps:g} req/s, or send more requests"
        )
    else:
        return ""
    grew = [f"{point.rate_rps:g}" for point in known if point not in usable and (high is None or point.rate_rps < high)]
    at_these = f"; at {', '.join(grew)} req/s latencies grew to the end, which longer runs would settle"
    return reason + (at_these if grew else "")


def _why_none_is_sure(known: Sequence[RatePoint], usable: Sequence[RatePoint], share: float, high: float | None) -> str:
    """Why, and what to do: a lower rate helps only where fewer than `share` were seen to be kept."""
    meeting = [point for point in usable if point.share >= share and (high is None or point.rate_rps < high)]
    if meeting:
        most = meeting[-1]
        higher = ", or go higher" if high is None and most is known[-1] else ""
        return (
            f"{most.share:.0%} met at {most.rate_rps:g} req/s, but {most.samples:.0f} independent requests only show "
            f"at least {most.low:.0%} (95% confidence): send more{higher}"
        )
    found = f"no tested rate meets {share:.0%} with 95% confidence"
    if known[0].share >= share:
        return found
    return f"{found}: offer less than {known[0].rate_rps:g} req/s, or send more requests"


def _falling(points: Sequence[RatePoint]) -> list[float]:
    """Attainment at each rate, neighbours pooled until it nowhere rises (pool adjacent violators)."""
    pools: list[list[float]] = []  # samples that kept it, samples, points
    for point in points:
        pools.append([point.share * point.samples, point.samples, 1])
        while len(pools) > 1 and pools[-2][0] / pools[-2][1] < pools[-1][0] / pools[-1][1]:
            met, samples, number = pools.pop()
            pools[-1] = [pools[-1][0] + met, pools[-1][1] + samples, pools[-1][2] + number]
    return [met / samples for met, samples, number in pools for _ in range(int(number))]


def _crossing(rates: Sequence[float], attainments: Sequence[float], share: float) -> float | None:
    if not attainments or attainments[0] < share:
        return None
    last = max(place for place, each in enumerate(attainments) if each >= share)
    if last == len(attainments) - 1:
        return rates[last]
    part = (attainments[last] - share) / (attainments[last] - attainments[last + 1])
    return rates[last] + part * (rates[last + 1] - rates[last])
