"""What the runs of a sweep say together."""

from dataclasses import replace

import msgspec
import pytest

from sojourn.diagnosis.diagnose import diagnose
from sojourn.loadgen.search.points import by_rate, frontier, largest_rate, point_of, rate_sentence, scaled
from sojourn.ui.figures.sweep import goodput_against_rate
from tests.loadgen.search.search_documents import point
from tests.metrics.synthetic import PLANTS, synthetic_run, with_steal


def test_a_point_is_what_its_run_says(tmp_path):
    run = synthetic_run(tmp_path / "run", plant=replace(PLANTS["healthy"], failing_share=0.2), requests=120)
    found = point_of(run, rate_rps=6.0, repeat=1, seed=0)
    assert found.run == "run" and found.valid and found.sent == 120
    assert found.completed == (run.requests().status == "ok").sum() < 120
    assert found.attainment == found.good / 120 <= found.completed / 120
    assert found.goodput_by_scale["1"] == pytest.approx(found.goodput_rps)
    scenario = {"arrivals": {"process": "poisson", "rate_rps": 4, "duration_s": 1e4}}
    run.update_meta(scenario=scenario, arrivals={"loop": "open"})
    declared = point_of(run, rate_rps=4, repeat=1, seed=0)
    assert declared.goodput_rps == declared.goodput_by_scale["1"] == pytest.approx(declared.good / 1e4)
    assert declared.due_rps == 120 / 1e4 and found.due_rps is None
    drawn = goodput_against_rate(by_rate([declared])).data
    assert [line.y[0] for line in drawn] == [declared.due_rps, declared.goodput_rps]
    assert diagnose(run).goodput[0].goodput_rps == declared.goodput_rps
    by_scale = list(found.goodput_by_scale.values())
    assert by_scale == sorted(by_scale), "looser objectives cannot give less goodput"


def test_points_of_a_rate_are_pooled_and_invalid_ones_only_counted():
    rates = by_rate([point(4, 0.9), point(2, 1.0), point(4, 0.8, 2), point(4, 0.1, 3, valid=False)])
    assert [rate.rate_rps for rate in rates] == [2, 4]
    assert (rates[1].points, rates[1].invalid, rates[1].sent, rates[1].uncounted) == (3, 1, 400, 200)
    assert rates[1].attainment == pytest.approx(0.85) and rates[1].goodput_rps == pytest.approx(4 * 0.85)
    assert rates[1].attainment_low < 0.85 < rates[1].attainment_high
    untold = msgspec.structs.replace(point(4, 0.9), tokens_per_s=None, goodput_tokens_per_s=None)
    assert by_rate([untold, point(4, 0.8, 2)])[0].tokens_per_s is None
    (lost,) = by_rate([point(4, 0.1, valid=False)])
    assert lost.attainment is None and lost.goodput_rps is None


def test_the_largest_rate_counts_dependent_requests_as_fewer():
    points = [point(2, 1.0), point(4, 0.96), point(8, 0.8)]
    most = largest_rate(by_rate(points))
    assert (most.low_rps, most.high_rps) == (4, 8) and 4 < most.rate_rps < 8
    assert rate_sentence(most) == "about 5.5 requests/s meet 90%; 4 meets it and 8 fails it, with 95% confidence"
    few = largest_rate(by_rate([msgspec.structs.replace(each, effective=20.0) for each in points]))
    assert not few.resolved and few.rate_rps == pytest.approx(5.5, abs=0.5)
    assert "about 5.5 requests/s meet 90%; 96% met at 4 req/s, but 20 independent requests" in rate_sentence(few)
    edge = largest_rate(by_rate([msgspec.structs.replace(point(4, 1.0), effective=20.0)]))
    assert edge.at_edge and rate_sentence(edge).startswith("100% met at 4 req/s, but")
    assert rate_sentence(largest_rate([])) == "no request was sent at any rate"


def test_sure_is_what_the_interval_beside_the_rate_says():
    """Of 24 requests the interval is Student's, wider than the normal one, and it decides what surely keeps 90 %."""
    for attainment in (1.0, 0.95, 0.9, 0.8, 0.7):
        for effective in (3.0, 12.0, 24.0, 37.0, 38.0, 40.0, 300.0):
            (rate,) = by_rate([msgspec.structs.replace(point(4, attainment), effective=effective)])
            most = largest_rate([rate])
            assert (most.low_rps == 4) == (rate.attainment_low >= 0.9)
            assert (most.high_rps == 4) == (rate.attainment_high < 0.9)
            assert largest_rate([msgspec.structs.replace(rate, growing=True)]).low_rps is None


def test_a_rate_at_which_the_server_died_is_a_miss_and_is_not_lost(tmp_path):
    died = msgspec.structs.replace(point(8, 0.97, valid=False), died=True, invalid_reasons=["exit code -9"])
    rates = by_rate([point(2, 1.0), died])
    assert (rates[1].invalid, rates[1].died) == (0, "exit code -9")
    assert largest_rate(rates).high_rps == 8
    assert died.trial().died and died.trial().valid and died.trial().error == "exit code -9"
    run = synthetic_run(tmp_path / "run", plant=replace(PLANTS["healthy"], failing_share=0.2), requests=40)
    assert "requests were not served, most often:" in point_of(run, rate_rps=6.0, repeat=1, seed=0).notes[0]
    run.update_meta(valid=False, invalid_reasons=["exit code -9"])
    found = point_of(run, rate_rps=6.0, repeat=1, seed=0, died=True)
    assert found.counts and found.notes == ["6 requests/s: exit code -9; it counts as a miss"]


def test_a_rate_at_which_other_machines_took_cpu_time_says_so(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=40)
    assert point_of(with_steal(run, 0.9), rate_rps=6.0, repeat=1, seed=0).notes == []
    disturbed = point_of(with_steal(run, 12.0), rate_rps=6.0, repeat=1, seed=0)
    (said,) = disturbed.notes
    assert said.startswith("6 requests/s: other machines took 12.0% of the CPU time")
    quiet = point_of(with_steal(run, 0.9), rate_rps=6.0, repeat=2, seed=0)
    (rate,) = by_rate([quiet, disturbed])
    assert rate.steal_percent == pytest.approx(12.0)
    assert by_rate([point(2, 1.0)])[0].steal_percent is None


def test_the_frontier_takes_the_best_rate_and_says_where_more_was_not_tried():
    best = frontier(by_rate([point(2, 1.0), point(4, 0.95), point(8, 0.2)]), {"ttft_ms": 400.0})
    at_one = next(each for each in best if each.scale == 1)
    assert at_one.goodput_rps == pytest.approx(3.8) and at_one.rate_rps == 4 and not at_one.at_edge
    assert at_one.objectives_ms == {"ttft_ms": 400.0} and best[0].objectives_ms == {"ttft_ms": 100.0}
    assert frontier(by_rate([point(2, 1.0), point(8, 0.9)]), {})[-1].at_edge
    assert frontier(by_rate([point(2, 1.0, valid=False)]), {}) == []


def test_scaled_objectives_keep_what_they_do_not_bound():
    given = [{"klass": "chat", "ttft_ms": 100.0, "tpot_ms": None, "source": "x"}]
    assert scaled(given, 2) == [{"klass": "chat", "ttft_ms": 200.0, "tpot_ms": None, "source": "x"}]
