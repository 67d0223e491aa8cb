"""The largest rate that keeps 90 % stands between a rate that meets it and one that fails it, or is not resolved."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.loadgen.search.frontier import RatePoint, max_rate
from sojourn.metrics.statistics.intervals import wilson_bounds


def offered_at(rate_rps: float, good: int, sent: int, growing: bool = False) -> RatePoint:
    share = good / sent if sent else 0.0
    return RatePoint(rate_rps, share, sent, *wilson_bounds(share, sent, 1.96), growing)


points = st.lists(
    st.tuples(st.integers(1, 64), st.integers(0, 200), st.integers(0, 200)).map(
        lambda drawn: offered_at(float(drawn[0]), drawn[1], drawn[1] + drawn[2])
    ),
    max_size=8, unique_by=lambda point: point.rate_rps,
)  # fmt: skip


@settings(max_examples=200)
@given(points)
def test_estimate_lies_in_its_bracket_and_within_what_was_offered(offered):
    found = max_rate(offered)
    rates = [point.rate_rps for point in offered if point.samples]
    if found.rate_rps is not None:
        assert min(rates) <= found.rate_rps <= max(rates)
    assert found.resolved == (found.low_rps is not None and found.high_rps is not None)
    assert bool(found.reason) != found.resolved
    if found.resolved:
        assert found.low_rps < found.high_rps
    assert max_rate(list(reversed(offered))) == found


def test_rate_between_the_last_kept_and_the_first_missed_is_interpolated():
    found = max_rate([offered_at(2, 200, 200), offered_at(4, 192, 200), offered_at(8, 100, 200)])
    assert (found.low_rps, found.high_rps, found.resolved) == (4, 8, True)
    assert found.rate_rps == pytest.approx(4 + 4 * 0.06 / 0.46)


def test_attainment_that_rises_by_chance_is_pooled_with_its_neighbours():
    found = max_rate([offered_at(2, 200, 200), offered_at(4, 160, 200), offered_at(6, 190, 200), offered_at(8, 0, 200)])
    assert found.rate_rps == pytest.approx(2 + 2 * 0.1 / 0.125)  # 4 and 6 kept 87.5 % together


@settings(max_examples=100)
@given(points, st.sets(st.integers(1, 64)))
def test_growing_latencies_never_make_a_rate_look_better(offered, growing):
    """A growing rate may be called a miss, never one that keeps the share, and no estimate rests on it."""
    grown = [msgspec.structs.replace(point, growing=point.rate_rps in growing) for point in offered]
    before, found = max_rate(offered), max_rate(grown)
    assert found.low_rps not in growing and found.high_rps == before.high_rps
    assert (found.low_rps or 0) <= (before.low_rps or 0)


def test_a_rate_whose_latencies_grew_is_named_as_what_is_missing():
    found = max_rate([offered_at(2, 200, 200), offered_at(4, 200, 200, growing=True)])
    assert (found.rate_rps, found.low_rps, found.high_rps) == (2, 2, None)
    assert "at 4 req/s latencies grew to the end" in found.reason


@pytest.mark.parametrize(
    ("offered", "words"),
    [
        ([offered_at(2, 200, 200)], "offer more than 2 req/s"),
        ([offered_at(2, 20, 200)], "offer less than 2 req/s"),
        (
            [offered_at(2, 20, 20), offered_at(4, 20, 20)],
            "100% met at 4 req/s, but 20 independent requests only show at least 84% (95% confidence): "
            "send more, or go higher",
        ),
        ([offered_at(2, 20, 20), offered_at(4, 0, 20)], "100% met at 2 req/s, but 20 independent requests only show"),
        ([], "no request was sent"),
        ([offered_at(2, 0, 0)], "no request was sent"),
    ],
)
def test_rate_is_not_resolved_by_rates_on_one_side(offered, words):
    found = max_rate(offered)
    assert not found.resolved and words in found.reason


@settings(max_examples=100)
@given(points)
def test_less_is_advised_only_where_less_than_the_share_was_kept(offered):
    found, known = max_rate(offered), [point for point in offered if point.samples]
    if "offer less" in found.reason:
        assert min(known, key=lambda point: point.rate_rps).share < 0.9


def test_bracket_holds_the_true_rate_in_95_percent_of_simulated_sweeps():
    """Attainment falls from 1 at 4 req/s to 0 at 8: 90 % is kept up to 4.4."""
    random, rates = np.random.default_rng(0), np.arange(1.0, 9.0)
    held = []
    for _ in range(300):
        drawn = random.binomial(400, np.clip((8 - rates) / 4, 0, 1))
        found = max_rate([offered_at(rate, int(good), 400) for rate, good in zip(rates, drawn, strict=True)])
        held.append(found.resolved and found.low_rps <= 4.4 <= found.high_rps)
    assert np.mean(held) >= 0.95
