"""Figures of a sweep: one axis of rates, also over those that have no valid run, and labels that can be read."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sojourn.loadgen.search.points import by_rate
from sojourn.ui.figures.sweep import attainment_against_rate, goodput_against_rate, latency_against_rate
from tests.loadgen.search.search_documents import point

RATES = by_rate([point(2, 1.0), point(4, 0.96), point(16, 0.1, valid=False)])


def test_every_figure_has_the_same_rates_and_marks_those_without_a_valid_run():
    figures = [goodput_against_rate(RATES), attainment_against_rate(RATES, 0.9)]
    figures += [latency_against_rate(RATES, latency, 400.0) for latency in ("ttft_ms", "tpot_ms", "e2e_ms")]
    assert len({fig.layout.xaxis.range for fig in figures}) == 1 and figures[0].layout.xaxis.range[1] > 16
    for fig in figures:
        assert [line.x0 for line in fig.layout.shapes] == [16]
        assert [text.text for text in fig.layout.annotations] == ["not valid"]


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
