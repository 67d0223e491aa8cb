"""The miss-ratio curve of a run directory."""

import pandas as pd
import pytest

from sojourn.metrics.memory.miss_ratio import INFINITE, CurvePoint, miss_ratio_curve, prefix_outcomes
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import write_segment


def record(name: str, **more) -> RequestRecord:
    return RequestRecord(name, 0, 1, **more)


SERVED = [
    record("a", prefix_outcomes={"miss_cold": 40}, infinite_hit_tokens=0, resized_hit_tokens=[0, 0, 0, 0, 0]),
    record("b", prefix_outcomes={"hit": 16, "miss_evicted": 16, "miss_cold": 8}, infinite_hit_tokens=32,
           resized_hit_tokens=[0, 16, 32, 32, 32]),
    record("never placed", prompt_tokens=99),
]  # fmt: skip


@pytest.fixture
def requests(tmp_path) -> pd.DataFrame:
    """As a reader of the run finds them."""
    write_segment(tmp_path, "requests", [row(r) for r in SERVED], "0")
    return RunDirectory(tmp_path).table("requests")


def test_the_curve_is_the_share_of_all_tokens_that_asked(requests):
    curve = miss_ratio_curve(requests)
    assert [(point.ratio, point.hit_tokens) for point in curve] == [
        (0.5, 0), (1.0, 16), (2.0, 32), (4.0, 32), (8.0, 32), (INFINITE, 32)
    ]  # fmt: skip
    assert curve[1] == CurvePoint(1.0, 16, 80)
    assert curve[1].hit_ratio == 0.2 and curve[1].miss_ratio == 0.8
    assert prefix_outcomes(requests) == {"hit": 16, "miss_evicted": 16, "miss_cold": 48}


def test_a_size_that_was_not_judged_for_every_request_is_left_out(requests):
    rows = pd.concat([requests, pd.DataFrame([{
        "prefix_outcomes": {"miss_cold": 20}, "resized_hit_tokens": [0, 0], "infinite_hit_tokens": 0
    }])])  # fmt: skip
    assert [point.ratio for point in miss_ratio_curve(rows)] == [0.5, 1.0, INFINITE]


def test_a_run_of_before_or_without_requests_has_no_curve(requests):
    assert miss_ratio_curve(requests.drop(columns="resized_hit_tokens")) == []
    assert miss_ratio_curve(requests[requests.request_id == "never placed"]) == []
    assert miss_ratio_curve(requests.iloc[:0]) == []
    assert prefix_outcomes(requests.drop(columns="prefix_outcomes")) == {}
