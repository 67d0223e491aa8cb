"""A scenario and a seed give one schedule, with the arrivals and lengths that the scenario asks for."""

import csv
from datetime import datetime

import numpy as np
import pyarrow.parquet as pq
import pytest

from sojourn.loadgen.schedule.build import build_schedule
from sojourn.loadgen.schedule.request import SCHEDULE_FILE, read_schedule, save_schedule
from sojourn.loadgen.seeds import stable_seed
from sojourn.loadgen.traces.reader import TRACE_FOLDER
from tests.loadgen.scenarios import CHAT, scenario

UNIFORM = {"distribution": "uniform", "min_tokens": 10, "max_tokens": 20}
LOGNORMAL = {"distribution": "lognormal", "median_tokens": 100, "sigma": 0.5, "min_tokens": 1, "max_tokens": 100_000}


def offsets_s(schedule) -> np.ndarray:
    return np.array([request.due_offset_ns for request in schedule]) / 1e9


def test_same_seed_gives_the_same_schedule_and_another_seed_another():
    chosen = scenario({"process": "poisson", "rate_rps": 10, "count": 50}, [CHAT | {"prompt_tokens": UNIFORM}])
    assert build_schedule(chosen, 1, "x") == build_schedule(chosen, 1, "x")
    assert build_schedule(chosen, 1, "x") != build_schedule(chosen, 2, "x")


def test_seed_of_a_part_is_the_same_in_every_process():
    assert stable_seed(1, "arrivals") == 4676061740872541714


@pytest.mark.parametrize(
    ("arrivals", "cv"),
    [({"process": "poisson"}, 1.0), ({"process": "gamma", "cv": 0.5}, 0.5), ({"process": "gamma", "cv": 4}, 4.0),
     ({"process": "constant"}, 0.0)],
)  # fmt: skip
def test_gaps_have_the_rate_and_the_variation_that_were_asked_for(arrivals, cv):
    count = 10_000
    gaps = np.diff(offsets_s(build_schedule(scenario(arrivals | {"rate_rps": 50, "count": count}), 3, "x")))
    # 5 standard errors of a mean of `count` gaps; the CV of a gamma is heavier tailed, so 10 % is allowed for it
    assert gaps.mean() == pytest.approx(1 / 50, rel=5 * cv / count**0.5 + 1e-6)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_duration_and_count_both_bound_the_arrivals():
    timed = build_schedule(scenario({"process": "constant", "rate_rps": 10, "duration_s": 2}), 0, "x")
    assert len(timed) == 19 and offsets_s(timed)[-1] < 2  # the first arrival comes after one gap
    both = scenario({"process": "constant", "rate_rps": 10, "duration_s": 2, "count": 5})
    assert len(build_schedule(both, 0, "x")) == 5


def test_rate_does_not_change_what_is_asked_for():
    classes = [CHAT | {"prompt_tokens": LOGNORMAL}, CHAT | {"klass": "other", "output_tokens": UNIFORM}]
    slow, fast = (
        build_schedule(scenario({"process": "poisson", "rate_rps": rate, "count": 100}, classes), 5, "x")
        for rate in (1, 9)
    )
    assert [(r.klass, r.prompt_tokens, r.max_tokens) for r in slow] == [
        (r.klass, r.prompt_tokens, r.max_tokens) for r in fast
    ]
    assert np.allclose(offsets_s(slow), 9 * offsets_s(fast), rtol=1e-6)


def test_lengths_keep_their_bounds_and_their_median():
    classes = [CHAT | {"prompt_tokens": LOGNORMAL, "output_tokens": UNIFORM}]
    schedule = build_schedule(scenario({"process": "at_once", "count": 4000}, classes), 0, "x")
    assert {request.max_tokens for request in schedule} == set(range(10, 21))
    # the median of n lognormals has a standard error of 1.25 · sigma / √n: 1 %; 5 of them
    assert np.median([request.prompt_tokens for request in schedule]) == pytest.approx(100, rel=0.05)


def test_classes_come_by_weight_or_all_together():
    classes = [CHAT | {"weight": 3}, CHAT | {"klass": "rare"}]
    drawn = build_schedule(scenario({"process": "at_once", "count": 4000}, classes), 0, "x")
    assert sum(request.klass == "chat" for request in drawn) / 4000 == pytest.approx(0.75, abs=0.035)
    workload = {"each_arrival": "every_class", "classes": classes}
    pairs = build_schedule(scenario({"process": "times", "times_s": [1, 0]}, workload=workload), 0, "x")
    assert [(r.klass, r.due_offset_ns) for r in pairs] == [("chat", 0), ("rare", 0), ("chat", 10**9), ("rare", 10**9)]


def test_trace_is_replayed_as_it_was_but_for_speed_and_scale():
    with (TRACE_FOLDER / "AzureLLMInferenceTrace_conv.csv").open(newline="") as file:
        rows = [(datetime.fromisoformat(row["TIMESTAMP"][:26]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for row in csv.DictReader(file)]  # fmt: skip
    first = rows[0][0]
    slice_ = [row for row in rows if 100 <= (row[0] - first).total_seconds() < 120]
    length = {"distribution": "trace", "scale": 0.5, "min_tokens": 10, "max_tokens": 600}
    arrivals = {
        "process": "trace",
        "file": "AzureLLMInferenceTrace_conv.csv",
        "start_s": 100,
        "duration_s": 20,
        "speedup": 4,
    }
    schedule = build_schedule(scenario(arrivals, [CHAT | {"prompt_tokens": length, "output_tokens": length}]), 0, "x")
    assert len(schedule) == len(slice_) > 50
    assert np.allclose(offsets_s(schedule), [((row[0] - first).total_seconds() - 100) / 4 for row in slice_], atol=1e-6)
    assert [r.prompt_tokens for r in schedule] == [min(max(round(row[1] * 0.5), 10), 600) for row in slice_]
    assert [r.max_tokens for r in schedule] == [min(max(round(row[2] * 0.5), 10), 600) for row in slice_]
    thinned = build_schedule(scenario(arrivals | {"keep_one_in": 2}), 0, "x")
    assert len(thinned) == -(-len(schedule) // 2)


def test_warmup_requests_come_before_the_schedule():
    arrivals = {"process": "constant", "rate_rps": 1, "count": 5}
    requests = build_schedule(scenario(arrivals, measure={"warmup_requests": 2}), 0, "x")
    assert [request.prelude for request in requests] == [True] * 2 + [False] * 5


def test_saved_schedule_is_read_back_as_it_was(tmp_path):
    chosen = scenario({"process": "poisson", "rate_rps": 10, "count": 5}, [CHAT | {"top_p": 0.9, "temperature": 1}])
    schedule = build_schedule(chosen, 0, "x")
    save_schedule(tmp_path, schedule, chosen)
    assert read_schedule(tmp_path) == (schedule, "test")
    older = pq.read_table(tmp_path / SCHEDULE_FILE)
    pq.write_table(older.append_column("measured", [[True] * 5]), tmp_path / SCHEDULE_FILE)
    assert read_schedule(tmp_path) == (schedule, "test")  # a column that there is no more
    assert len({request.request_id for request in schedule}) == 5
