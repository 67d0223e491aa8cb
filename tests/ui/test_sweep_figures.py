"""Figures of a sweep: one axis of rates, also over those that have no valid run, and labels that can be read."""

import itertools
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.loadgen.search.curve import curves
from sojourn.loadgen.search.points import by_rate
from sojourn.ui.figures.sweep import attainment_against_rate, goodput_against_rate, latency_against_rate
from sojourn.ui.figures.tradeoff import throughput_against_tpot
from tests.loadgen.search.search_documents import point
from tests.loadgen.search.test_curve import curve_point, search

RATES = by_rate([point(2, 1.0), point(4, 0.96), point(16, 0.1, valid=False)])


def test_every_figure_has_the_same_rates_and_marks_those_without_a_valid_run():
    figures = [goodput_against_rate(RATES), attainment_against_rate(RATES, 0.9)]
    figures += [latency_against_rate(RATES, latency, 400.0) for latency in ("ttft_ms", "tpot_ms", "e2e_ms")]
    assert len({fig.layout.xaxis.range for fig in figures}) == 1 and figures[0].layout.xaxis.range[1] > 16
    for fig in figures:
        assert [line.x0 for line in fig.layout.shapes] == [16]
        assert [text.text for text in fig.layout.annotations] == ["not valid"]


def test_each_sweep_has_a_curve_with_its_goodput_and_its_crossing_and_a_note_where_nothing_is_known():
    points = [curve_point(2, 1.0, 10.0, 100.0, devices=2), curve_point(4, 0.95, 20.0, 200.0, devices=2),
              curve_point(8, 0.7, 40.0, 300.0, devices=2)]  # fmt: skip
    unknown = [msgspec.structs.replace(each, devices=None) for each in points[:2]]
    found = curves({"a": search(points), "b": search(unknown, {"max_num_seqs": 4})})
    drawn = {trace.name: trace for trace in throughput_against_tpot(found).data}
    curve = drawn["max_num_seqs=8"]
    assert list(curve.x) == [10, 20, 40] and list(curve.y) == [100, 200, 300]
    assert list(curve.text) == ["2/s", "4/s", "8/s"]
    assert list(curve.marker.symbol) == ["circle", "circle", "circle-open"], "open: too few are good"
    assert "max_num_seqs=8 · meets the SLO of TPOT: 250 tokens/s" in drawn and "SLO: TPOT ≤ 30 ms" in drawn
    assert list(drawn["frontier of all points (TPOT alone)"].x) == [10, 20, 40] and len(drawn["max_num_seqs=4"].x) == 2
    assert any(name.startswith("max_num_seqs=4 · goodput: ") and name.endswith("tokens/s or more") for name in drawn)
    by_user = {trace.name: trace for trace in throughput_against_tpot(found, per_user=True).data}
    assert list(by_user["max_num_seqs=8"].x) == [100, 50, 25] and list(by_user["max_num_seqs=8"].y) == [50, 100, 150]
    line, cross = by_user[""], by_user["max_num_seqs=8 · meets the SLO of TPOT: 125 tokens/s"]
    assert np.interp(cross.x[0], line.x[::-1], line.y[::-1]) == pytest.approx(cross.y[0], rel=0.01), (
        "it lies on its curve"
    )
    assert "max_num_seqs=4" not in by_user, "its devices are not known"
    for per_user, some in ((True, found[1:]), (False, curves({"a": search([])})), (False, [])):
        assert not throughput_against_tpot(some, per_user=per_user).data


@given(st.floats(1e-3, 1e6), st.floats(1.0, 1e6))
def test_log_axis_holds_what_is_drawn_between_a_few_labels(p50, ratio):
    rate = msgspec.structs.replace(RATES[0], quantiles_ms={"e2e_ms": {"p50": p50, "p90": p50 * ratio}})
    axis = latency_against_rate([rate], "e2e_ms", None).layout.yaxis
    low, high = (10**end for end in axis.range)
    shown = [tick for tick in axis.tickvals if low * 0.999 <= tick <= high * 1.001]
    assert low <= p50 * 1.001 and p50 * ratio < high * 1.001
    assert 2 <= len(shown) <= 12 and shown[0] == pytest.approx(low) and shown[-1] == pytest.approx(high)
    apart = [math.log10(after / before) for before, after in itertools.pairwise(shown)]
    assert min(apart) >= math.log10(high / low) / 14  # none over another
