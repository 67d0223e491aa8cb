"""A sweep as a curve: what is drawn, what is left out, and the same figures in its files."""

import csv
import io
import json
import random

import msgspec
import pytest

from sojourn.loadgen.search.curve import (
    PLAN_FILE,
    curve_csv,
    curve_json,
    curves,
    differences,
    labels,
    read_curves,
    read_plan,
)
from sojourn.loadgen.search.points import Search, by_rate, largest_rate, sweeps
from sojourn.ui.markup.sweep_report import write_sweep_report
from tests.loadgen.search.search_documents import point, sweep_of

SLO = {"ttft_ms": 1e6, "tpot_ms": 30.0}


def curve_point(rate, attainment, tpot, tokens, repeat=1, **more):
    quantiles = {"p50": tpot / 2, "p90": tpot, "p95": None, "p99": None}
    made = point(rate, attainment, repeat)
    return msgspec.structs.replace(
        made, tokens_per_s=tokens, quantiles_ms=dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms"), quantiles), **more
    )


def search(points, engine=None, **plan):
    target = {"base_url": None, "engine": engine or {}}
    scenario = {"name": "chat", "engine": {"max_num_seqs": 8}, "arrivals": {"rate_rps": 2}, "measure": {}}
    document = {"scenario": scenario, "rates_rps": [], "repeats": 1, "target": target, "objectives_ms": SLO}
    return Search(kind="sweep", plan=document | plan, points=points)


POINTS = [
    curve_point(2, 1.0, 10.0, 100.0, devices=2, joules_per_token=0.5),
    curve_point(4, 0.95, 20.0, 200.0, devices=2, joules_per_token=0.25),
    curve_point(8, 0.70, 40.0, 300.0, devices=2, joules_per_token=0.2),
]


def test_a_curve_has_its_goodput_where_the_largest_rate_lies_and_its_crossing_at_the_slo():
    (found,) = curves({"a": search(POINTS)}, usd_per_hour=3.6)
    assert [each.rate_rps for each in found.points] == [2, 4, 8] and found.quantile == "p90"
    most = largest_rate(by_rate(POINTS))
    assert (found.goodput.rate_rps, found.goodput.low_rps) == (most.rate_rps, most.low_rps)
    assert found.goodput.tokens_per_s == pytest.approx(200 + 100 * (most.rate_rps - 4) / 4)
    assert found.crossing.tokens_per_s == pytest.approx(250)
    assert (found.crossing.within.rate_rps, found.crossing.beyond.rate_rps) == (4, 8)
    assert found.devices == 2 and found.tokens_per_usd == pytest.approx(1000 * found.goodput.tokens_per_s)
    assert found.tokens_per_joule == pytest.approx(4), "of 4 requests/s, the largest measured rate below the goodput"
    assert found.goodput.missed == ["tpot_ms"]
    shuffled = random.Random(1).sample(POINTS, 3)
    assert curves({"a": search(shuffled)}, usd_per_hour=3.6) == [found]


def test_what_is_not_known_stays_unknown_and_what_is_given_counts():
    plain = [msgspec.structs.replace(each, devices=None, joules_per_token=None) for each in POINTS]
    (found,) = curves({"a": search(plain, objectives_ms={})})
    assert (found.devices, found.tokens_per_usd, found.tokens_per_joule, found.crossing) == (None, None, None, None)
    (given,) = curves({"a": search(plain, objectives_ms={})}, devices=4, slo_ms=15.0)
    assert given.devices == 4 and given.crossing.tokens_per_s == pytest.approx(150)
    (kept,) = curves({"a": search(POINTS)}, devices=4)
    assert kept.devices == 2, "what the server reports stands above what is given"


def test_runs_are_not_judged_by_another_slo_than_the_sweeps_own():
    (own,) = curves({"a": search(POINTS)}, usd_per_hour=3.6, slo_ms=SLO["tpot_ms"])
    assert own.goodput.rate_rps and own.points[0].attainment == 1.0
    (other,) = curves({"a": search(POINTS)}, usd_per_hour=3.6, slo_ms=15.0)
    assert other.crossing.tokens_per_s == pytest.approx(150) and other.left_out == []
    found = other.goodput
    assert (found.rate_rps, found.tokens_per_s, found.tpot_ms, found.missed) == (None, None, None, [])
    assert "at a TPOT of 15 ms is not known" in found.sentence
    assert (other.tokens_per_usd, other.tokens_per_joule) == (None, None)
    assert {each.attainment for each in other.points} == {None}
    judged = ("attainment", "attainment_low", "attainment_high", "goodput_rps", "good_output_tokens_per_s")
    assert all(row[name] in (None, "") for row in csv.DictReader(io.StringIO(curve_csv([other]))) for name in judged)


def test_repeats_give_a_range_and_a_rate_without_a_quantile_or_a_valid_run_is_named():
    points = [curve_point(2, 1.0, 10.0, 100.0), curve_point(2, 1.0, 14.0, 90.0, 2), curve_point(4, 1.0, 20.0, 200.0)]
    points += [msgspec.structs.replace(curve_point(8, 0.7, 40.0, 300.0), valid=False)]
    few = {"tpot_ms": {"p50": 9.0, "p90": None}}
    points.append(msgspec.structs.replace(curve_point(16, 0.7, 1.0, 300.0), quantiles_ms=few))
    (found,) = curves({"a": search(points)})
    first, second = found.points
    assert first.tpot_range_ms == (10, 14) and first.tokens_range_per_s == (90, 100) and first.tpot_ms == 12
    assert second.tpot_range_ms is None
    assert found.left_out == [
        "8 requests/s: no valid run", "16 requests/s: too few served requests per run for a TPOT p90"
    ]  # fmt: skip
    short = [msgspec.structs.replace(each, quantiles_ms={"tpot_ms": {"p50": 5.0, "p90": None}}) for each in points]
    (median,) = curves({"a": search(short)})
    assert median.quantile == "p50" and len(median.points) == 3


def test_configurations_are_named_by_what_differs():
    plans = {"a": search([], {"max_num_seqs": 4, "threads": 1}).plan, "b": search([], {"threads": 1}).plan}
    assert labels(plans) == {"a": "max_num_seqs=4", "b": "max_num_seqs=8"}
    assert labels({"a": plans["a"]}) == {"a": "a"}
    assert labels({"a": plans["a"], "c": plans["a"]}) == {"a": "a", "c": "c"}
    three = labels(plans | {"c": plans["a"]})
    assert three == {"a": "a: max_num_seqs=4", "b": "max_num_seqs=8", "c": "c: max_num_seqs=4"}
    other = search([], objectives_ms={}, hardware={"cpu": "x"})
    assert differences([search([]), search([], {"max_num_seqs": 4})]) == []
    assert differences([search([]), other]) == ["objectives_ms", "hardware"]


def test_files_hold_the_points_that_are_drawn(tmp_path):
    found = curves({"a": search(POINTS), "b": search(POINTS[:2], {"max_num_seqs": 4})}, usd_per_hour=3.6)
    rows = list(csv.DictReader(io.StringIO(curve_csv(found))))
    assert [(row["configuration"], float(row["rate_rps"])) for row in rows] == [
        ("max_num_seqs=8", 2), ("max_num_seqs=8", 4), ("max_num_seqs=8", 8), ("max_num_seqs=4", 2),
        ("max_num_seqs=4", 4),
    ]  # fmt: skip
    assert float(rows[1]["output_tokens_per_s_per_device"]) == 100 and float(rows[1]["tokens_per_s_per_user"]) == 50
    assert float(rows[1]["output_tokens_per_usd"]) == 200_000 and float(rows[1]["output_tokens_per_joule"]) == 4
    document = json.loads(curve_json(found))
    assert [len(each["points"]) for each in document] == [3, 2]
    assert document[0]["crossing"]["tokens_per_s"] == pytest.approx(250) and document[0]["goodput"]["rate_rps"] > 4
    assert curve_csv([]) == ""


def test_a_stored_plan_of_a_run_of_the_sweep_or_of_the_same_scenario_is_recommended(tmp_path):
    sweep = sweep_of(tmp_path / "sweep", {2: 1.0, 4: 0.96, 8: 0.85})
    plan = {
        "run": "rate-4-1", "doubts": ["steps larger than any of the run"], "settings": {"max_num_seqs": 32},
        "objectives": [{"klass": "all", "tpot_ms": 30.0}],
        "best_limit": {"rate_rps": 6.5, "prediction": {
            "tpot_ms": {"p50": {"low": 10.0, "median": 11.0, "high": 12.0},
                        "p90": {"low": 20.0, "median": 25.0, "high": None}}, "output_tokens_per_s": 130.0}},
    }  # fmt: skip
    for folder, name in ((sweep / "rate-4-1", None), (tmp_path / "same", "chat"), (tmp_path / "other", "agents")):
        folder.mkdir()
        (folder / PLAN_FILE).write_text(json.dumps(plan))
        (folder / "run.json").write_text(json.dumps({"scenario": {"name": name}}))
    assert "The replays are not trusted: steps larger" in write_sweep_report([sweep]).read_text()
    (found,) = read_curves([sweep])
    assert [each.label for each in found.recommended] == ["max_num_seqs=32"] * 2
    assert found.recommended[0].tpot_ms.median == 25 and found.recommended[0].tokens_per_s == 130
    assert found.recommended[0].slo_tpot_ms == 30
    (median,) = read_curves([sweep], quantile="p50")
    assert [each.tpot_ms.median for each in median.recommended] == [11, 11], "a star lies on the curve's own axis"
    second = sweep_of(tmp_path / "second", {2: 1.0, 4: 0.96, 8: 0.85})
    both = read_curves([sweep, second])
    assert [len(each.recommended) for each in both] == [2, 0], "a plan beside both sweeps is one star"
    for broken in ("{", "[]", json.dumps(plan | {"best_limit": None})):
        (tmp_path / "other" / PLAN_FILE).write_text(broken)
        assert read_plan(tmp_path / "other" / PLAN_FILE) is None


def test_trials_of_a_capacity_search_are_a_curve_too_and_an_interrupted_search_has_none(tmp_path):
    scenario = {"name": "chat", "objectives": [{"klass": "all", "tpot_ms": 30.0}]}
    warm_up = msgspec.structs.replace(POINTS[0], warm_up=True)
    for name, points in (("capacity-chat", [warm_up, *POINTS]), ("begun", [])):
        plan = {"scenario": scenario, "target": {"base_url": None, "engine": {}}, "seed": 1}
        (tmp_path / name).mkdir()
        document = msgspec.json.encode(Search(kind="capacity", plan=plan, points=points))
        (tmp_path / name / "capacity.json").write_bytes(document)
    (tmp_path / "capacity-chat" / "sweep.json").write_bytes((tmp_path / "capacity-chat/capacity.json").read_bytes())
    assert len(sweeps(tmp_path)) == 2, "a folder of both searches is one, read as a sweep"
    (tmp_path / "capacity-chat" / "sweep.json").unlink()
    searches = sweeps(tmp_path)
    assert {folder.name for folder in searches} == {"capacity-chat", "begun"}
    found = {curve.name: curve for curve in read_curves(searches)}
    assert found["capacity-chat"].slo_ms == 30 and found["capacity-chat"].crossing.tokens_per_s == pytest.approx(250)
    assert found["begun"].points == [] and found["begun"].goodput.rate_rps is None
    for folder in searches:
        assert "Throughput against time per output token" in write_sweep_report([folder]).read_text()
