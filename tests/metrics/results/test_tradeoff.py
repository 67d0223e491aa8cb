"""The curve of throughput against TPOT: its frontier and its crossing hold for every set of points."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.metrics.results.tradeoff import (
    CurvePoint,
    at_rate,
    crossing,
    crossing_sentence,
    frontier,
    tokens_per_usd,
)

POSITIVE = st.floats(0.01, 1e6)
POINT = st.builds(CurvePoint, rate_rps=POSITIVE, tpot_ms=POSITIVE, tokens_per_s=POSITIVE)
POINTS = st.lists(POINT, max_size=8)


@given(POINTS, POSITIVE, st.randoms(), st.lists(st.tuples(st.floats(1.0, 9.0), st.floats(0.1, 1.0)), max_size=6))
def test_neither_the_order_of_the_rates_nor_a_dominated_point_moves_the_crossing(points, slo, random, worse):
    found = crossing(points, slo)
    dominated = [
        CurvePoint(rate_rps=1.0, tpot_ms=point.tpot_ms * slower, tokens_per_s=point.tokens_per_s * less)
        for point, (slower, less) in zip(points, worse, strict=False)
        if slower > 1 or less < 1
    ]
    more = [*points, *dominated]
    random.shuffle(more)
    again = crossing(more, slo)
    assert (again.tokens_per_s, again.within is None, again.beyond is None) == (
        found.tokens_per_s, found.within is None, found.beyond is None,
    )  # fmt: skip
    assert again.is_reached or not found.is_reached


@given(POINTS, POSITIVE, POSITIVE)
def test_a_looser_slo_never_gives_less(points, one, other):
    strict, loose = crossing(points, min(one, other)), crossing(points, max(one, other))
    assert (strict.tokens_per_s or 0.0) <= (loose.tokens_per_s or 0.0) * (1 + 1e-9)


@given(POINTS, POSITIVE)
def test_the_crossing_lies_within_its_bracket_and_no_measured_point_within_the_slo_beats_it(points, slo):
    found = crossing(points, slo)
    kept = [point.tokens_per_s for point in points if point.tpot_ms <= slo]
    assert (found.tokens_per_s is None) == (not kept)
    if kept:
        assert found.within.tokens_per_s == max(kept) and found.within.tpot_ms <= slo
        most = found.beyond.tokens_per_s if found.beyond is not None else max(kept)
        assert max(kept) <= found.tokens_per_s <= most * (1 + 1e-9)
    if found.beyond is not None:
        assert found.is_reached and found.beyond.tpot_ms > slo


@given(POINTS)
def test_each_point_is_on_the_frontier_or_beaten_by_one_that_is(points):
    best = frontier(points)
    for point in points:
        assert any(each.tpot_ms <= point.tpot_ms and each.tokens_per_s >= point.tokens_per_s for each in best)
    for one in best:
        assert not any(each.tpot_ms < one.tpot_ms and each.tokens_per_s >= one.tokens_per_s for each in points)
        assert not any(each.tpot_ms <= one.tpot_ms and each.tokens_per_s > one.tokens_per_s for each in points)


def _point(rate, tpot, tokens):
    return CurvePoint(rate_rps=rate, tpot_ms=tpot, tokens_per_s=tokens)


@pytest.mark.parametrize(
    ("points", "slo", "tokens", "words"),
    [
        ([_point(12, 20, 400), _point(20, 40, 600)], 30, 500,
         "about 500 output tokens/s at a TPOT p90 of 30 ms, interpolated between 12 requests/s (400 tokens/s) and 20"),
        ([_point(12, 20, 400), _point(20, 25, 600)], 30, 600,
         "a TPOT p90 of 30 ms is not reached within the sweep: at least 600 output tokens/s, at 20 requests/s"),
        ([_point(12, 20, 400), _point(20, 40, 390)], 30, 400,
         "400 output tokens/s within a TPOT p90 of 30 ms, at 12 requests/s; slower points give no more"),
        ([_point(12, 31, 400)], 30, None, "no measured rate keeps a TPOT p90 of 30 ms: offer less"),
        ([], 30, None, "no measured rate keeps"),
    ],
)  # fmt: skip
def test_the_crossing_says_what_is_measured_and_what_is_not(points, slo, tokens, words):
    found = crossing(points, slo)
    assert found.tokens_per_s == (None if tokens is None else pytest.approx(tokens))
    assert crossing_sentence(found, "p90").startswith(words)


def test_a_rate_between_two_measured_ones_is_interpolated_and_one_outside_is_not_known():
    points = [_point(20, 40, 600), _point(12, 20, 400)]
    assert at_rate(points, 16) == pytest.approx((30, 500)) and at_rate(points, 12) == (20, 400)
    assert at_rate(points, 21) is None and at_rate(points, 1) is None and at_rate([], 1) is None
    assert tokens_per_usd(100, 2) == 180_000 and tokens_per_usd(100, None) is tokens_per_usd(None, 2) is None
