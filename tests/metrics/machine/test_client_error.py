"""The client's error by load: looked up between measured points, never below a point with less load, never beyond."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.metrics.errors import CalibrationError
from sojourn.metrics.machine.client_error import (
    Calibration,
    Error,
    Point,
    beyond_capacity,
    calibration_table,
    client_error_sentence,
    error_at_load,
    load_calibration,
    store_calibration,
    stream_load,
)


def point(streams: int, tokens_per_s: float, p99_ms: float, delivered: float = 1.0) -> Point:
    error = Error(p99_ms / 3, p99_ms)
    return Point(streams, tokens_per_s, 10, 1000, 0, delivered, error, error, error, error, 0.5)


def calibration(*points: Point, bound_ms: float = 5.0, company: str | None = None) -> Calibration:
    return Calibration("a machine", "a client", "2026-11-21T12:00:00+00:00", {}, bound_ms, list(points), company)


GRID = calibration(
    point(1, 20, 0.2), point(100, 20, 1.0), point(400, 20, 4.0),
    point(1, 50, 0.2), point(100, 50, 2.0), point(400, 50, 8.0),
)  # fmt: skip


@pytest.mark.parametrize(
    ("streams", "rate", "error_ms"),
    [
        (100, 20, 1.0),  # a measured point is itself
        (250, 20, 2.5),  # halfway between two
        (100, 35, 1.5),  # halfway between two rates
        (0.0, 50, 0.2),  # below the smallest, the smallest
        (100, 5, 1.0),  # slower than the slowest streams: as many at once
        (50, 100, 2.0),  # twice as fast as the fastest: as much work as twice as many
        (401, 20, None),  # more than was measured
        (250, 100, None),
    ],
)
def test_error_between_measured_points(streams, rate, error_ms):
    assert GRID.error_ms(streams, rate) == (None if error_ms is None else pytest.approx(error_ms))


@given(
    st.lists(st.floats(0.01, 100), min_size=3, max_size=3), st.floats(0, 400), st.floats(0, 400), st.floats(1, 50)
)  # fmt: skip
def test_more_streams_never_have_a_smaller_error(errors, fewer, more, rate):
    measured = calibration(*(point(count, 50, error) for count, error in zip((1, 100, 400), errors, strict=True)))
    fewer, more = sorted((fewer, more))
    assert measured.error_ms(fewer, rate) <= measured.error_ms(more, rate) + 1e-9


def test_capacity_is_the_largest_load_below_which_all_is_within_the_bound():
    assert (GRID.capacity().streams, GRID.capacity().tokens_per_s) == (400, 20)
    bad_below = calibration(point(1, 50, 9.0), point(100, 50, 1.0))
    assert bad_below.capacity() is None and "too busy" in calibration_table(bad_below).caption


def test_point_with_wrong_counts_ends_what_was_measured():
    wrong = msgspec.structs.replace(point(100, 50, 0.3), wrong_counts=1)
    measured = calibration(point(1, 50, 0.2), wrong, point(400, 50, 0.4))
    assert measured.capacity().streams == 1 and measured.error_ms(50, 50) is None
    assert calibration(wrong).rates() == [] and calibration(wrong).capacity() is None


def test_bound_is_held_against_the_worst_of_stamps_first_tokens_and_gaps():
    good, bad = Error(0.1, 0.2), Error(0.1, 9.0)
    for stamp, ttft, itl in ((bad, good, good), (good, bad, good), (good, good, bad)):
        measured = calibration(Point(10, 50, 10, 1000, 0, 1.0, stamp, ttft, itl, good, 0.5))
        assert measured.capacity() is None and measured.error_ms(10, 50) == 9.0
    late = calibration(Point(10, 50, 10, 1000, 0, 1.0, good, good, good, bad, 0.5))
    assert late.capacity() is not None  # how late it sent is measured in every run itself, as client.lag


def test_point_where_the_server_was_the_limit_is_not_counted():
    measured = calibration(point(1, 50, 0.2), point(100, 50, 0.3, delivered=0.9))
    assert "* not counted" in calibration_table(measured).caption
    assert "* not counted" not in calibration_table(GRID).caption
    assert measured.capacity().streams == 1 and measured.error_ms(50, 50) is None


def test_sentence_and_validity_follow_the_load():
    within = error_at_load(GRID, 250, 20.0)
    assert client_error_sentence({"calibration": within}).startswith("±2.5 ms (p99) at this load, 250 streams of 20")
    assert beyond_capacity(within) is None
    above = error_at_load(GRID, 400, 50.0)
    assert "400 streams of 50 chunks/s is an error of 8.0 ms (p99)" in beyond_capacity(above)
    assert "up to 400 streams of 20 tokens/s" in beyond_capacity(above)
    beyond = error_at_load(GRID, 500, 50.0)
    assert "more than was measured" in beyond_capacity(beyond)
    assert client_error_sentence({"calibration": beyond}).startswith("not known: 500 streams")
    assert error_at_load(GRID, 400, 50.0, processes=4)["worst_p99_ms"] == pytest.approx(2.0)


def test_run_without_a_calibration_says_how_to_make_one():
    for told in (None, {}, {"lag_p50_ms": 1.0}):
        assert client_error_sentence(told) == "not calibrated; run `sojourn calibrate client`"
    assert beyond_capacity(None) is None and beyond_capacity({"unknown": "not calibrated"}) is None


def test_kept_calibration_is_of_one_machine_and_one_client(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = store_calibration(GRID)
    assert load_calibration("a machine", "a client") == GRID
    with pytest.raises(CalibrationError, match="another version of the client; run `sojourn calibrate client` again"):
        load_calibration("a machine", "another client")
    with pytest.raises(CalibrationError, match=r"^not calibrated; run `sojourn calibrate client`$"):
        load_calibration("another machine", "a client")
    path.write_text("{")
    with pytest.raises(CalibrationError, match="cannot be read"):
        load_calibration("a machine", "a client")


def test_load_of_a_run_is_the_streams_at_once_and_the_rate_of_each():
    second = 1_000_000_000
    first = np.arange(8) * second  # each streams for four seconds: four at once, but at both ends
    streams, rate = stream_load(first, first + 4 * second, np.full(8, 201))
    assert (streams, rate) == (4.0, 50.0)
    assert stream_load(first[:0], first[:0], first[:0]) == (0.0, 0.0)
    assert stream_load(first, first, np.ones(8, dtype=int)) == (0.0, 0.0)  # whole replies stream for no time


def test_short_peak_does_not_make_the_load_and_a_held_one_does():
    ms = 1_000_000
    long_first, long_last = np.zeros(10, dtype=int), np.full(10, 10_000 * ms)
    burst = np.full(90, 5_000 * ms)
    for burst_ms, streams in ((20, 10.0), (500, 100.0)):
        told, _ = stream_load(
            np.concatenate([long_first, burst]), np.concatenate([long_last, burst + burst_ms * ms]),
            np.full(100, 10),
        )  # fmt: skip
        assert told == streams
