"""The offset of two clocks is found from requests alone, and the truth lies within what is stated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.run.clocks import estimate_offset

US, MS, S = 1_000, 1_000_000, 1_000_000_000


def stamps(rng, count: int, seconds: float, offset_ns: int, drift: float, way_in_ns, way_out_ns):
    """Pairs of stamps of `count` requests whose server's clock is ahead by `offset_ns`, and gains `drift` ns a ns."""
    sent = np.sort(rng.integers(0, int(seconds * S), count)) + 50_000 * S
    arrived_true = sent + way_in_ns(count)
    made_true = arrived_true + rng.integers(MS, 800 * MS, count)
    read = made_true + way_out_ns(count)

    def server(client_ns):
        return client_ns + offset_ns + np.rint(drift * (client_ns - 50_000 * S)).astype("int64")

    return sent, server(arrived_true), server(made_true), read, server


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10_000),
    offset_ms=st.integers(-(10**9), 10**9),
    drift_ppm=st.floats(-100, 100),
    in_us=st.integers(20, 20_000),
    out_us=st.integers(20, 20_000),
    count=st.integers(3, 200),
    seconds=st.sampled_from((1.0, 60.0, 3600.0)),
)
def test_true_offset_lies_within_the_stated_uncertainty(seed, offset_ms, drift_ppm, in_us, out_us, count, seconds):
    rng = np.random.default_rng(seed)
    sent, arrived, made, read, server = stamps(
        rng, count, seconds, offset_ms * MS, drift_ppm * 1e-6,
        lambda n: in_us * US + rng.exponential(in_us * US, n).astype("int64"),
        lambda n: out_us * US + rng.exponential(out_us * US, n).astype("int64"),
    )  # fmt: skip
    found = estimate_offset(sent, arrived, made, read)
    moments = np.linspace(sent[0], read.max(), 7).astype("int64")
    inside = (server(moments) >= min(arrived.min(), made.min())) & (server(moments) <= max(arrived.max(), made.max()))
    error = np.abs(found.to_client(server(moments)) - moments)[inside]
    assert (error <= found.uncertainty_ns + 2).all()
    assert found.uncertainty_ns <= (in_us + out_us) * US * 6 + 500e-6 * seconds * S


def test_asymmetric_way_makes_the_bound_loose_and_not_wrong():
    rng = np.random.default_rng(3)
    sent, arrived, made, read, server = stamps(
        rng, 400, 60, -7 * S, 0.0, lambda n: rng.integers(9 * MS, 12 * MS, n), lambda n: rng.integers(MS, 2 * MS, n)
    )
    found = estimate_offset(sent, arrived, made, read)
    error = abs(float(found.at(int(server(sent[200])))) + 7 * S)
    assert 3 * MS < error <= found.uncertainty_ns < 6 * MS


def test_drift_of_a_long_run_is_a_line_and_not_an_average():
    rng = np.random.default_rng(1)
    sent, arrived, made, read, server = stamps(
        rng,
        500,
        7200,
        S,
        50e-6,
        lambda n: rng.integers(50 * US, 90 * US, n),
        lambda n: rng.integers(50 * US, 90 * US, n),
    )
    found = estimate_offset(sent, arrived, made, read)
    assert found.drift == pytest.approx(50e-6, rel=0.01)
    assert found.uncertainty_ns < 200 * US  # an average would be off by 180 ms at both ends
    for place in (0, 499):
        assert abs(int(found.to_client(server(sent))[place]) - sent[place]) < 200 * US


def test_clock_that_was_set_during_the_run_is_refused():
    rng = np.random.default_rng(2)
    sent, arrived, made, read, _ = stamps(
        rng, 50, 60, S, 0.0, lambda n: rng.integers(MS, 2 * MS, n), lambda n: rng.integers(MS, 2 * MS, n)
    )
    arrived[25:] -= 500 * MS
    made[25:] -= 500 * MS
    with pytest.raises(RunDataError, match="was a clock set during the run"):
        estimate_offset(sent, arrived, made, read)


def test_nothing_is_known_without_stamps_of_both():
    nothing = np.zeros(0, dtype="int64")
    with pytest.raises(RunDataError, match="no request has stamps of both clocks"):
        estimate_offset(nothing, nothing, nothing, nothing)
