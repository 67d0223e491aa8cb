"""What exchanges should cost: sizes by their definition, and times over links whose limits are known."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.metrics.compute.communication import GroupShape, bubbles, predicted
from sojourn.metrics.compute.link import LINK_COLLECTIVES, LinkTime, fitted_link

GROUP = GroupShape(
    tensor_parallel=2, pipeline_parallel=1, expert_parallel=1, num_layers=3, num_mixtures=0, hidden_size=8,
    vocab_size=11, item_bytes=4,
)  # fmt: skip


def link(collective="all_reduce", latency_ns=50e3, bytes_per_s=1e9, waits=()):
    times = [LinkTime(size, latency_ns + 1e9 * size / bytes_per_s) for size in (1 << 10, 1 << 16, 1 << 22)]
    return fitted_link(collective, "gloo", 2, times, waits)


@given(st.floats(1e3, 1e6), st.floats(1e7, 1e12))
def test_fit_gives_latency_and_bandwidth_back(latency_ns, bytes_per_s):
    found = link(latency_ns=latency_ns, bytes_per_s=bytes_per_s)
    assert found.latency_ns == pytest.approx(latency_ns, rel=1e-3)
    assert found.fit_error < 1e-3
    if 1e9 * (1 << 22) / bytes_per_s > latency_ns:  # the largest message tells something of the bandwidth
        assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=1e-2)


def test_size_that_something_else_held_up_counts_as_the_larger_one():
    times = [LinkTime(1 << 10, 50e3), LinkTime(1 << 14, 900e3), LinkTime(1 << 16, 60e3)]
    assert [time.ns for time in fitted_link("send", "gloo", 2, times).times] == [50e3, 60e3, 60e3]


def test_prediction_is_the_sum_over_all_exchanges_and_the_wait_for_the_slower_rank():
    links = [link(waits=[(1e6, 20e3), (3e6, 60e3)]), link("all_gather", latency_ns=10e3)]
    tokens, rows, busy = np.array([1, 100]), np.array([1, 4]), np.array([2e6, 9e6])
    found = predicted(GROUP, links, tokens, rows, busy)
    sums = 7 * (50e3 + tokens * 8 * 4.0)  # at 1 GB/s a byte takes a nanosecond
    assert found.exchange_ns == pytest.approx(sums + 10e3 + rows * 12 * 4.0, rel=1e-6)
    assert found.wait_ns == pytest.approx(0.02 * busy)


def test_prediction_without_the_link_is_none():
    assert predicted(GROUP, [link()], 1, 1, 1e6) is None


def test_slowest_stage_sets_the_pace_and_the_others_have_bubbles():
    assert bubbles([4.0, 4.0], 0.0, 0.0, under_way=2) == (4.0, [0.0, 0.0])
    period, shares = bubbles([6.0, 3.0], 0.0, 0.0, under_way=2)
    assert period == 6.0 and shares == [0.0, 0.5]
    period, shares = bubbles([4.0, 4.0], 0.0, 0.0, under_way=1)  # one request: each stage waits for the other
    assert period == 8.0 and shares == [0.5, 0.5]
    assert bubbles([4.0, 4.0], 1.0, 0.5, under_way=1).period_ns == 10.0


def test_known_collectives_are_those_of_the_link():
    assert set(GROUP.exchanges(1, 1)) <= set(LINK_COLLECTIVES)
