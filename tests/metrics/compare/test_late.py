"""Runs whose client was late compare where the delay decides nothing."""

import pytest

from sojourn.metrics.compare.comparable import SENT_LATE, is_only_late
from sojourn.metrics.compare.runs import NotComparable, compare_runs
from tests.metrics.synthetic import PLANTS, synthetic_run

LATE = f"{SENT_LATE}: p99 300.0 ms, above 50.0 ms; lower the rate"


def late_run(folder, name, plant, lag_ms, reasons=(LATE,)):
    from dataclasses import replace

    run = synthetic_run(folder / name, plant=replace(PLANTS[plant], lag_ms=lag_ms), requests=60)
    run.update_meta(valid=False, invalid_reasons=list(reasons), arrivals=None)
    return run


def test_a_gain_far_beyond_the_delay_is_told_and_one_that_is_the_delay_is_not(tmp_path):
    slow = late_run(tmp_path, "slow", "small_batch_cap", 100.0)
    fast = late_run(tmp_path, "fast", "healthy", 300.0)
    with pytest.raises(NotComparable):  # another load
        compare_runs([slow], [fast])
    prompt = synthetic_run(tmp_path / "prompt", plant="healthy", requests=60)
    metrics = {each.metric: each for each in compare_runs([prompt], [fast], metrics=["ttft_mean", "tpot_mean"]).metrics}
    assert metrics["ttft_mean"].verdict == "cannot tell" and "late on A" in metrics["ttft_mean"].reason
    shares = {each.metric: each for each in compare_runs([prompt], [fast], metrics=["attainment"]).metrics}
    assert shares["attainment"].verdict != "worse", "only the delay made requests late"


def test_any_other_reason_is_refused_as_before(tmp_path):
    prompt = synthetic_run(tmp_path / "prompt", plant="healthy", requests=60)
    other = late_run(tmp_path, "other", "healthy", 300.0, (LATE, "3 of 60 requests were never sent"))
    assert not is_only_late(other.meta())
    with pytest.raises(NotComparable, match="never sent"):
        compare_runs([prompt], [other])
