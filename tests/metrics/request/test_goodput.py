"""Goodput counts what was due, and a failure never helps."""

import math
import re
from random import Random

import msgspec
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.interop.exported.prometheus import Exporter
from sojourn.metrics.request.goodput import class_goodput, goodput_by_tpot, judged, measured
from sojourn.metrics.request.latencies import QUANTILE_MIN_SAMPLES, quantiles
from sojourn.metrics.request.objectives import objectives_of
from sojourn.metrics.results.load import declared_window_s
from tests.metrics.random_records import random_request
from tests.metrics.synthetic import synthetic_run

MS = 1_000_000


def frame(rows: list[dict]) -> pd.DataFrame:
    """A requests frame of (klass, status, ttft_ms, tpot_ms, tokens), one request due every 100 ms."""
    built = []
    for index, row in enumerate(rows):
        ok = row["status"] == "ok"
        due = index * 100 * MS
        first = due + int(row["ttft_ms"] * MS)
        stamps = [first + int(step * row["tpot_ms"] * MS) for step in range(row["tokens"])]
        built.append(
            {
                "request_id": f"r{index}", "klass": row["klass"], "status": row["status"], "due_ns": due,
                "last_byte_ns": stamps[-1] if ok else None, "output_tokens": row["tokens"] if ok else None,
                "chunk_ns": stamps if ok else [], "chunk_tokens": [1] * len(stamps) if ok else [],
                "ttft_ms": row["ttft_ms"] if ok else math.nan,
                "tpot_ms": row["tpot_ms"] if ok and row["tokens"] > 1 else math.nan,
                "e2e_ms": (stamps[-1] - due) / MS if ok else math.nan,
            }
        )  # fmt: skip
    return pd.DataFrame(built)


# The claims hold for any handful of requests; each example builds a frame, so that a few dozen are enough.
few = settings(max_examples=30)

request = st.fixed_dictionaries(
    {
        "klass": st.sampled_from(["chat", "document"]),
        "status": st.sampled_from(["ok", "ok", "ok", "error", "timeout", "cancelled", "missing"]),
        "ttft_ms": st.floats(1, 2000),
        "tpot_ms": st.floats(1, 200),
        "tokens": st.integers(1, 6),
    }
)
requests = st.lists(request, min_size=1, max_size=25)


def bounds(ttft_ms=None, tpot_ms=None, klass="all") -> list[dict]:
    return [{"klass": klass, "ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "e2e_ms": None, "source": "test"}]


@few
@given(requests, st.floats(1, 2000), st.floats(1, 200))
def test_good_never_exceeds_completed_and_completed_never_exceeds_sent(rows, ttft_ms, tpot_ms):
    result = class_goodput(frame(rows), bounds(ttft_ms, tpot_ms))
    for row in result:
        assert 0 <= row.good <= row.completed <= row.sent
        assert 0 <= row.attainment <= 1
    assert sum(row.sent for row in result[1:]) in (0, result[0].sent)
    assert sum(row.good for row in result[1:]) in (0, result[0].good)


@few
@given(requests, st.floats(1, 2000), st.floats(0.1, 100))
def test_goodput_of_a_declared_window_is_never_above_the_rate_that_came_in_it(rows, ttft_ms, declared_s):
    built = frame(rows)
    whole, *_ = class_goodput(built, bounds(ttft_ms), declared_s)
    seconds = max(declared_s, (len(rows) - 1) * 0.1)  # one request due every 100 ms
    assert whole.goodput_rps == pytest.approx(whole.attainment * len(rows) / seconds)
    assert whole.window.declared and whole.window.seconds == pytest.approx(seconds)
    least, *_ = class_goodput(built, bounds(ttft_ms), seconds * 2)
    assert least.goodput_rps == pytest.approx(whole.goodput_rps / 2)


@pytest.mark.parametrize(("arrivals", "loop", "seconds"), [
    ({"process": "poisson", "rate_rps": 4, "duration_s": 5}, "open", 4),
    ({"process": "poisson", "rate_rps": 4, "duration_s": 5, "count": None}, "open", 4),
    ({"process": "poisson", "rate_rps": 4, "duration_s": 5, "count": 7}, "open", None),
    ({"process": "phases", "phases": [{"duration_s": 5}, {"duration_s": 6}]}, "open", 10),
    ({"process": "trace", "file": "ends earlier", "duration_s": 5}, "open", None),
    ({"process": "poisson", "rate_rps": 4, "duration_s": 5}, "open, closed within a session", None),
    ({"process": "concurrency", "in_flight": 4, "duration_s": 5}, "closed", None),
    ({"process": "at_once", "count": 5}, "open", None),
    ({"process": "poisson", "rate_rps": 4, "duration_s": 1}, "open", None),
])  # fmt: skip
def test_window_is_declared_where_nothing_else_ends_the_load(arrivals, loop, seconds):
    meta = {"scenario": {"arrivals": arrivals, "measure": {"warmup_s": 1.0}}, "arrivals": {"loop": loop}}
    assert declared_window_s(meta) == seconds and declared_window_s({}) is None


@few
@given(requests, st.floats(1, 2000), st.floats(1, 3))
def test_attainment_never_falls_when_an_objective_is_relaxed(rows, ttft_ms, factor):
    strict, loose = (class_goodput(frame(rows), bounds(bound))[0] for bound in (ttft_ms, ttft_ms * factor))
    assert strict.good <= loose.good
    assert strict.goodput_tokens_per_s <= loose.goodput_tokens_per_s


@few
@given(requests, st.floats(1, 2000))
def test_failing_request_counts_in_the_denominator(rows, ttft_ms):
    before = class_goodput(frame(rows), bounds(ttft_ms))[0]
    failed = {"klass": "chat", "status": "error", "ttft_ms": 1.0, "tpot_ms": 1.0, "tokens": 2}
    after = class_goodput(frame([*rows, failed]), bounds(ttft_ms))[0]
    assert after.sent == before.sent + 1 and after.good == before.good
    assert after.attainment <= before.attainment


def test_objective_of_a_class_goes_before_that_of_all():
    objectives = [*bounds(100, 20, "chat"), *bounds(500, None, "all"), *bounds(None, 50, "all")]
    assert objectives_of("chat", objectives) == {"ttft_ms": 100, "tpot_ms": 20}
    assert objectives_of("document", objectives) == {"ttft_ms": 500, "tpot_ms": 50}
    assert objectives_of("chat", None) == {}
    assert objectives_of("chat", [{"klass": "chat", "ttft_ms": 100}, {"ttft_ms": 500}]) == {"ttft_ms": 100}


def test_first_token_that_never_came_misses_its_objective_everywhere():
    served = {"klass": "chat", "status": "ok", "ttft_ms": 5.0, "tpot_ms": 1.0, "tokens": 1}
    silent = frame([served]).assign(ttft_ms=math.nan, output_tokens=0)
    row = judged(silent, bounds(100, 30)).iloc[0]
    exporter = Exporter("tiny", bounds(100, 30))
    exporter.observe_request(
        msgspec.structs.replace(
            random_request(Random(0)), klass="chat", token_ns=[], first_written_ns=None, error=None,
            finish_reason="stop", output_tokens=0,
        )
    )  # fmt: skip
    page = exporter.render().decode()
    for objective, met in (("ttft_ms", row.ttft_met), ("tpot_ms", row.tpot_met), ("all_objectives", row.good)):
        outcome = "met" if met else "missed"
        assert re.search(rf'objective_total{{.*objective="{objective}",outcome="{outcome}"}} 1.0', page), objective
    assert not row.ttft_met and row.tpot_met and not row.good


@pytest.mark.parametrize("status", ["ok", "error"])
def test_unmeasured_time_per_token_is_judged_only_where_the_request_failed(status):
    rows = frame([{"klass": "chat", "status": status, "ttft_ms": 5.0, "tpot_ms": 1.0, "tokens": 4}])
    row = judged(rows.assign(tpot_ms=math.nan), bounds(100, 30)).iloc[0]
    assert pd.isna(row.tpot_met) if status == "ok" else not row.tpot_met
    assert row.good == (status == "ok") and row.tpot_unmeasured == (status == "ok")


def test_single_token_keeps_every_time_per_output_token():
    rows = [{"klass": "chat", "status": "ok", "ttft_ms": 5.0, "tpot_ms": 1.0, "tokens": 1}]
    assert class_goodput(frame(rows), bounds(None, 1.0))[0].good == 1


def test_server_that_counts_no_tokens_is_judged_by_its_chunks():
    rows = frame([{"klass": "chat", "status": "ok", "ttft_ms": 5.0, "tpot_ms": 30.0, "tokens": 4}])
    rows["output_tokens"], rows["tpot_ms"] = None, math.nan
    assert judged(rows, bounds(None, 20.0)).good.tolist() == [False]
    assert judged(rows, bounds(None, 40.0)).good.tolist() == [True]


@pytest.mark.parametrize(("name", "fewest"), QUANTILE_MIN_SAMPLES.items())
def test_quantile_is_claimed_only_from_enough_samples(name, fewest):
    values = pd.Series(range(fewest), dtype="float64")
    assert quantiles(values)[name] is not None
    assert quantiles(values[:-1])[name] is None
    assert quantiles(values[:-1])["max"] == fewest - 2


def test_quantile_among_failures_is_not_claimed():
    values = pd.Series(range(90), dtype="float64")
    assert quantiles(values, failed=0)["p90"] == 80
    assert quantiles(values, failed=10)["p90"] == 89
    assert quantiles(values, failed=11)["p90"] is None


def test_warm_up_is_left_out_by_time_and_by_number():
    rows = frame([{"klass": "a", "status": "ok", "ttft_ms": 1.0, "tpot_ms": 1.0, "tokens": 2}] * 10)
    assert len(measured(rows, {"scenario": {"measure": {"warmup_s": 0.25}}})) == 7
    assert len(measured(rows, {"scenario": {"measure": {"warmup_requests": 4}}})) == 6
    assert len(measured(rows, {"scenario": None})) == 10


@few
@given(requests)
def test_windows_hold_every_token_that_clients_read(rows):
    built = frame(rows)
    windows = goodput_by_tpot(built, bounds(500))
    read = sum(len(stamps) for stamps in built.chunk_ns)
    assert windows.tokens.sum() == read
    assert (windows.good_tokens_per_s <= windows.tokens_per_s).all()


def test_window_of_a_steady_stream_shows_its_own_time_per_token():
    built = frame([{"klass": "a", "status": "ok", "ttft_ms": 10.0, "tpot_ms": 20.0, "tokens": 200}])
    windows = goodput_by_tpot(built, [])
    assert windows.tokens.tolist() == [50, 50, 50, 50]  # read at 10, 30, 50 … 3,990 ms
    assert windows.tpot_ms[1] == pytest.approx(20.0)
    assert windows.tokens_per_s[1] == pytest.approx(50.0)
    assert windows.streams[1] == pytest.approx(1.0)


def test_run_without_requests_has_no_goodput_and_does_not_fail(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=5, keep=lambda records: records.client.clear())
    whole = class_goodput(run.requests(), bounds(100))
    assert whole[0].sent == 0 and whole[0].goodput_rps == 0.0
    assert goodput_by_tpot(run.requests(), bounds(100)).empty


def test_attainment_has_an_interval_that_is_wider_where_fates_are_shared():
    good = {"klass": "chat", "status": "ok", "ttft_ms": 5.0, "tpot_ms": 1.0, "tokens": 2}
    late = good | {"ttft_ms": 500.0}
    apart = class_goodput(frame([good, late] * 100), bounds(100))[0]
    together = class_goodput(frame(([good] * 20 + [late] * 20) * 5), bounds(100))[0]
    assert apart.attainment == together.attainment == 0.5
    widths = [row.attainment_interval.high - row.attainment_interval.low for row in (apart, together)]
    assert widths[1] > 2 * widths[0]
    assert class_goodput(frame([good])[:0], bounds(100))[0].attainment_interval is None
