"""Throughput against time per output token (TPOT), a point per rate: its frontier, and what it gives within a bound.

A larger batch gives more tokens per second and makes each of them wait longer. Between two measured rates the curve is
not known: a value there is interpolated, and the two measured points stand beside it. Pure functions.
"""

from collections.abc import Sequence

import msgspec

Range = tuple[float, float]


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a rate gave. Ranges are from the smallest to the largest of its repeats; None of a single run."""

    rate_rps: float
    tpot_ms: float
    tokens_per_s: float  # output tokens of all requests
    tpot_range_ms: Range | None = None
    tokens_range_per_s: Range | None = None
    unit: str = "requests/s"  # of `rate_rps`; of a closed loop the number of sessions, or of requests in flight
    attainment: float | None = None  # share of the sent requests that met every objective
    median_tpot_ms: float | None = None  # `tpot_ms` may be of another quantile

    @property
    def user_tokens_per_s(self) -> float:
        """How fast one reader gets tokens."""
        return 1000.0 / self.tpot_ms

    @property
    def interactivity(self) -> float | None:
        """... by the median, as InferenceX publishes it."""
        return 1000.0 / self.median_tpot_ms if self.median_tpot_ms else None


class Crossing(msgspec.Struct, frozen=True, kw_only=True):
    """The most throughput with a TPOT of at most `slo_ms`."""

    slo_ms: float
    tokens_per_s: float | None  # interpolated from `within` to `beyond`; None where no point is within
    within: CurvePoint | None  # the measured point of most throughput within the bound
    beyond: CurvePoint | None  # the next point of the frontier; None where no point has more throughput
    is_reached: bool  # whether some point is beyond the bound: otherwise higher rates may give more


def frontier(points: Sequence[CurvePoint]) -> list[CurvePoint]:
    """The points that no other one beats in both: by TPOT, and throughput rises with it (Pareto)."""
    found: list[CurvePoint] = []
    for point in sorted(points, key=lambda each: (each.tpot_ms, -each.tokens_per_s)):
        if not found or point.tokens_per_s > found[-1].tokens_per_s:
            found.append(point)
    return found


def crossing(points: Sequence[CurvePoint], slo_ms: float) -> Crossing:
    """Where the frontier meets the bound: between two measured points, or at the last one that is within."""
    best = frontier(points)
    within = next((point for point in reversed(best) if point.tpot_ms <= slo_ms), None)
    beyond = next((point for point in best if point.tpot_ms > slo_ms), None)
    tokens_per_s = within.tokens_per_s if within is not None else None
    if within is not None and beyond is not None:
        part = (slo_ms - within.tpot_ms) / (beyond.tpot_ms - within.tpot_ms)
        tokens_per_s = within.tokens_per_s + part * (beyond.tokens_per_s - within.tokens_per_s)
    return Crossing(
        slo_ms=slo_ms, tokens_per_s=tokens_per_s, within=within, beyond=beyond,
        is_reached=any(point.tpot_ms > slo_ms for point in points),
    )  # fmt: skip


def crossing_sentence(found: Crossing, quantile: str) -> str:
    """`about 420 output tokens/s at a TPOT p90 of 25 ms, interpolated between 12 requests/s (380 tokens/s) and …`."""
    bound = f"TPOT {quantile} of {found.slo_ms:g} ms"
    within, beyond = found.within, found.beyond
    if within is None:
        return f"no measured rate keeps a {bound}: offer less"
    at = f"at {within.rate_rps:g} {within.unit}"
    if beyond is not None:
        return (
            f"about {found.tokens_per_s:,.3g} output tokens/s at a {bound}, interpolated between {within.rate_rps:g} "
            f"{within.unit} ({within.tokens_per_s:,.0f} tokens/s) and {beyond.rate_rps:g} ({beyond.tokens_per_s:,.0f})"
        )
    if found.is_reached:
        return f"{within.tokens_per_s:,.0f} output tokens/s within a {bound}, {at}; slower points give no more"
    return (
        f"a {bound} is not reached within the sweep: at least {within.tokens_per_s:,.0f} output tokens/s, {at}; "
        "higher rates would show more"
    )


def at_rate(points: Sequence[CurvePoint], rate_rps: float) -> tuple[float, float] | None:
    """TPOT in ms and output tokens per second at a rate, interpolated between its neighbours; None outside of them."""
    ordered = sorted(points, key=lambda point: point.rate_rps)
    low = next((point for point in reversed(ordered) if point.rate_rps <= rate_rps), None)
    high = next((point for point in ordered if point.rate_rps >= rate_rps), None)
    if low is None or high is None:
        return None
    part = (rate_rps - low.rate_rps) / (high.rate_rps - low.rate_rps) if high.rate_rps > low.rate_rps else 0.0
    return (
        low.tpot_ms + part * (high.tpot_ms - low.tpot_ms),
        low.tokens_per_s + part * (high.tokens_per_s - low.tokens_per_s),
    )


def tokens_per_usd(tokens_per_s: float | None, usd_per_hour: float | None) -> float | None:
    """Output tokens for one dollar of the machine's time."""
    return None if tokens_per_s is None or not usd_per_hour else tokens_per_s * 3600 / usd_per_hour
