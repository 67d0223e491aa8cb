"""Runs that did not do the same work are not compared, and what is nobody's speed decides no verdict."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_record

from sojourn.commands.compare import compare
from sojourn.metrics.compare.metrics import METRICS
from sojourn.metrics.compare.runs import compare_runs
from sojourn.metrics.compare.samples import RunSamples
from sojourn.metrics.compare.verdict import Compared, outlasting
from sojourn.metrics.compare.workload import Work, other_work, shifts, work_of
from sojourn.metrics.errors import InputError
from sojourn.metrics.run.directory import RunDirectory
from tests.metrics.synthetic import synthetic_run

few = settings(max_examples=40)
TOKENS = np.random.default_rng(0).lognormal(3, 0.5, 200)
LIKE = Work(requests=100, failed_share=0.0, output_tokens=20.0, cached_share=None, lag_ms=0.0)


def side(tokens: np.ndarray = TOKENS, cached: float = 0.2) -> list[RunSamples]:
    """A run as `other_work` reads it; a request without tokens was not served."""
    requests = pd.DataFrame({
        "served": ~np.isnan(tokens), "output_tokens": tokens, "prompt_tokens": 100.0, "cached_tokens": 100 * cached,
        "sent_ns": 0, "due_ns": 0,
    })  # fmt: skip
    return [RunSamples(None, requests, 0, 1.0)]


def latency(verdict: str, ratio: float) -> Compared:
    return Compared(metric="e2e_mean", verdict=verdict, a=100.0, b=100 * ratio, ratio=ratio, low=ratio / 1.01,
                    high=ratio * 1.01, margin=0.05, paired=True, clusters=20, p_worse=0.001)  # fmt: skip


@few
@given(st.floats(0.5, 2), st.booleans())
def test_replies_surely_longer_or_shorter_than_the_margin_are_other_work(factor, paired):
    assume(abs(abs(math.log(factor)) - math.log(1.05)) > 1e-9)  # at the margin itself rounding decides
    faults = other_work(side(), side(TOKENS * factor), paired, True, 0.05, 0.95)
    if paired:  # the same requests: nothing is left to chance
        assert bool(faults) == (abs(math.log(factor)) > math.log(1.05))
    else:
        assert not faults or abs(math.log(factor)) > math.log(1.05)
    assert not other_work(side(), side(np.full(200, np.nan)), paired, True, 0.05, 0.95)  # nothing was served


@few
@given(st.floats(0, 1), st.floats(0, 1))
def test_a_cache_that_had_more_is_other_work_unless_settings_explain_it(a, b):
    assert bool(other_work(side(cached=a), side(cached=b), True, True, 0.05, 0.95)) == (abs(a - b) > 0.05)
    assert not other_work(side(cached=a), side(cached=b), True, False, 0.05, 0.95)


@few
@given(st.lists(st.floats(1, 1000), min_size=4, max_size=40), st.data())
def test_the_shift_of_failed_requests_gives_the_mean_with_them_as_slow_as_any(values, data):
    served = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    if not served.any():
        return
    values = np.array(values)
    lossy = replace_record(LIKE, failed_share=1 - float(served.mean()))
    mean, slowest = float(values[served].mean()), float(values.max())
    truth = float(np.where(served, values, slowest).mean())
    for a, b, means, sign in ((LIKE, lossy, (50.0, mean), 1), (lossy, LIKE, (mean, 50.0), -1)):
        total = sum(shift.log_ratio for shift in shifts(METRICS["e2e_mean"], a, b, means, slowest))
        assert total == pytest.approx(sign * math.log(truth / mean), abs=1e-9)
    assert not any(shift.log_ratio for shift in shifts(METRICS["e2e_p90"], LIKE, lossy, (mean, mean), slowest))


def test_no_verdict_rests_on_what_the_client_sent_late_or_on_what_failed():
    late = replace_record(LIKE, lag_ms=8.0)
    for a, b, found, holds in (
        (LIKE, late, latency("worse", 1.09), False),  # 8 of the 9 % are the client's
        (LIKE, late, latency("worse", 1.20), True),
        (late, LIKE, latency("no worse", 1.0), False),  # B was sent in time, and is 8 % slower
        (late, LIKE, latency("no worse", 0.9), True),
        (late, late, latency("worse", 1.09), True),
        (LIKE, replace_record(LIKE, failed_share=0.02), latency("no worse", 1.0), False),
        (LIKE, replace_record(LIKE, failed_share=0.002), latency("no worse", 1.0), True),
        (LIKE, replace_record(LIKE, failed_share=0.02), latency("worse", 1.1), True),
    ):
        for shift in shifts(METRICS["e2e_mean"], a, b, (found.a, found.b), 400.0):
            found = outlasting(found, shift)
        assert (found.verdict != "cannot tell") == holds == (not found.reason), found


def changed(path, steps=False, **fields) -> RunDirectory:
    """The healthy run with other fields in each of its client records."""

    def keep(records):
        records.steps[:] = records.steps if steps else []
        records.client[:] = [
            replace_record(each, **{name: change(getattr(each, name)) for name, change in fields.items()})
            for each in records.client
        ]

    return synthetic_run(path, requests=150, keep=keep)


def test_other_work_and_other_settings_are_refused_told_and_may_be_forced(tmp_path, capsys):
    a = changed(tmp_path / "a", steps=True)
    half = changed(tmp_path / "half", steps=True, output_tokens=lambda tokens: tokens // 2)
    with pytest.raises(InputError, match=r"not do the same work: a reply of B has 0\.\d+ times the output tokens"):
        compare_runs([a], [half], metrics=["e2e_mean"])
    assert any("same work" in note for note in compare_runs([a], [half], metrics=["e2e_mean"], force=True).notes)
    assert compare_runs([a], [half], metrics=["step_p50"]).verdict == "no worse"  # alike steps are alike work
    warm = changed(tmp_path / "warm", cached_tokens=lambda tokens: tokens + 50)
    with pytest.raises(InputError, match=r"0\.0% of the prompt tokens of A were cached and .*same seed"):
        compare_runs([a], [warm])
    assert work_of([RunSamples(a, a.requests().assign(served=True), 0, 1.0)]).cached_share == 0.0
    with pytest.raises(InputError, match="a is on both sides"):
        compare_runs([a], [RunDirectory(tmp_path / "half" / ".." / "a")], force=True)
    warm.update_meta(versions={"simulated_server": "2"})
    with pytest.raises(InputError, match="of the prompt tokens of A were cached"):  # another build with these settings
        compare_runs([a], [warm])
    rebuilt = changed(tmp_path / "rebuilt")
    rebuilt.update_meta(versions={"simulated_server": "2"})
    with pytest.raises(InputError, match=r"rebuilt is no repetition of .*a: versions.simulated_server"):
        compare_runs([a, rebuilt], [half, warm], metrics=["e2e_mean"])
    with pytest.raises(SystemExit) as ended:
        compare(a.path, rebuilt.path, metric=None, margin=["5%"], confidence=0.95, force=False, json=False)
    assert ended.value.code == 0
    assert "failed 0.0% / 0.0% of 150 / 150 requests" in " ".join(capsys.readouterr().out.split())
