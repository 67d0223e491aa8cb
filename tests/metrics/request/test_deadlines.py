"""A stall misses the deadlines that pass in it; holding tokens back and giving up gain nothing."""

import math
import time

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.metrics.request.deadlines import class_deadlines, fluidity, missed_deadlines, smooth_worth
from tests.metrics.request.test_latencies import failed, served

few = settings(max_examples=100)
gaps = st.lists(st.integers(0, 400), min_size=1, max_size=40)


def by_recurrence(gaps_ms: list[int], first_ms: int, each_ms: int) -> tuple[int, int]:
    """Etalon's recurrence over gaps, as its paper tells it: slack accrues, a late token uses it up."""
    missed = total = slack = 0
    for place, gap in enumerate(gaps_ms):
        allowed = first_ms if place == 0 else each_ms
        if gap <= allowed + slack:
            slack += allowed - gap
            total += 1
            continue
        late = gap - slack - allowed
        passed = 1 + late // each_ms
        missed, total, slack = missed + passed, total + passed, 0
    return missed, total


@few
@given(gaps, st.integers(1, 500), st.integers(1, 100))
def test_deadlines_on_the_clock_are_the_recurrence_over_gaps(gaps_ms, first_ms, each_ms):
    assert missed_deadlines(np.cumsum(gaps_ms), first_ms, each_ms) == by_recurrence(gaps_ms, first_ms, each_ms)


def a_pass_for_each_miss(read_ms: np.ndarray, first_ms: float, each_ms: float) -> tuple[int, int]:
    """The rest of the stream against its deadlines, anew behind each token that was late: quadratic, and plain."""
    missed = met = 0
    while len(read_ms):
        late_ms = read_ms - (first_ms + each_ms * np.arange(len(read_ms)))
        late = np.flatnonzero(late_ms > 0)
        place = late[0] if len(late) else len(read_ms)
        met += int(place)
        if len(late):
            missed += 1 + int(late_ms[place] // each_ms)
            first_ms = float(read_ms[place]) + each_ms
        read_ms = read_ms[place + 1 :]
    return missed, missed + met


@few
@given(st.lists(st.floats(0, 400), max_size=60), st.floats(0.1, 500), st.floats(0.1, 100))
def test_one_pass_counts_what_a_pass_for_each_miss_does(gaps_ms, first_ms, each_ms):
    read_ms = np.cumsum(gaps_ms)
    assert missed_deadlines(read_ms, first_ms, each_ms) == a_pass_for_each_miss(read_ms, first_ms, each_ms)


def test_a_stream_that_is_always_late_costs_no_more_than_its_length():
    begun = time.process_time()
    assert missed_deadlines(np.arange(1, 200_001) * 30.0, 20, 20) == (200_000, 200_000)
    assert time.process_time() - begun < 2  # a pass for each miss: most of a minute


def test_stall_of_five_token_times_misses_five_deadlines_and_slack_pays_for_it():
    even = np.arange(100, 1100, 20.0)  # first token on its deadline, then one each 20 ms
    stalled = np.concatenate([even[:10], even[10:] + 90])
    assert missed_deadlines(even, 100, 20) == (0, 50)
    assert missed_deadlines(stalled, 100, 20)[0] == 5  # of 20 ms each passed in a gap of 110
    assert missed_deadlines(stalled, 200, 20) == (0, 50)  # 100 ms early at the first token
    assert missed_deadlines(even[:0], 100, 20) == (0, 0) and fluidity(even[:0], 100, 20) == 0.0


@few
@given(gaps, st.integers(1, 500), st.integers(1, 100), st.integers(0, 300))
def test_smooth_worth_is_at_most_the_tokens_and_never_rises_with_a_delay(gaps_ms, first_ms, each_ms, delay_ms):
    read_ms = np.cumsum(gaps_ms).astype(float)
    worth = smooth_worth(read_ms, first_ms, each_ms)
    assert 0 <= worth <= len(read_ms)
    assert smooth_worth(read_ms + delay_ms, first_ms, each_ms) <= worth
    held_back = np.maximum.accumulate(np.maximum(read_ms, read_ms[-1] - each_ms * np.arange(len(read_ms))[::-1]))
    assert smooth_worth(held_back, first_ms, each_ms) <= worth  # even gaps at the cost of later tokens


def test_smooth_worth_of_a_late_answer_falls_by_a_token_each_token_time():
    even = np.arange(100, 300, 20.0)
    assert smooth_worth(even, 100, 20) == 10
    assert smooth_worth(even + 60, 100, 20) == pytest.approx(7)
    assert smooth_worth(even + 1000, 100, 20) == 0


def objectives(**more) -> list[dict]:
    return [{"klass": "all", "ttft_ms": 100.0, "tpot_ms": 20.0, "e2e_ms": None, "source": "test"} | more]


def test_request_that_was_not_served_has_met_no_deadline_and_is_counted():
    good = [served(50.0 * n, 50.0 * n, [50.0 * n + 90, 50.0 * n + 110]) for n in range(30)]
    (whole,) = class_deadlines(pd.DataFrame(good), objectives())
    (mixed,) = class_deadlines(pd.DataFrame([*good, failed(700), failed(710, "cancelled")]), objectives())
    assert whole.fluidity == 1 and whole.fluid == 30 and mixed.sent == 32
    assert mixed.fluidity == pytest.approx(30 / 32) and mixed.fluid == 30
    assert mixed.smooth_goodput_tokens_per_s == pytest.approx(whole.smooth_goodput_tokens_per_s)
    assert whole.smooth_goodput_tokens_per_s == pytest.approx(whole.output_tokens_per_s)


def test_tokens_of_an_answer_that_was_cut_count_for_nothing():
    whole, cut = served(0, 0, [50.0, 60.0]), served(10, 10, [60.0, 70.0]) | {"status": "cancelled"}
    (row,) = class_deadlines(pd.DataFrame([whole, cut]), objectives())
    assert (row.fluidity, row.fluid) == (0.5, 1)
    assert row.output_tokens_per_s == row.smooth_goodput_tokens_per_s == pytest.approx(2 / 0.07)


def test_first_deadline_may_grow_with_the_prompt():
    late = pd.DataFrame([served(0, 0, [150.0, 165.0]), served(10, 10, [160.0, 175.0])])
    (strict,) = class_deadlines(late, objectives())
    (longer,) = class_deadlines(late, objectives(ttft_ms_per_prompt_token=5.0))  # 10 tokens: 50 ms more
    assert strict.fluidity < 1 and longer.fluidity == 1


def test_class_without_both_objectives_has_no_deadlines():
    rows = pd.DataFrame([served(0, 0, [150.0, 165.0])])
    assert class_deadlines(rows, objectives(tpot_ms=None)) == [] and class_deadlines(rows[:0], objectives()) == []
    assert not math.isnan(class_deadlines(rows, objectives())[0].fluidity)
