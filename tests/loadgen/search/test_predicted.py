"""Simulated loads on the axes of a sweep: the same columns, and totals that close."""

import csv
import io

import msgspec
import pytest

from sojourn.loadgen.search.curve import curve_csv, curves
from sojourn.loadgen.search.predicted import BACKLOG, planned_curves, sized_curves
from sojourn.metrics.compute.model_catalog import find_model
from sojourn.metrics.prediction import Change
from sojourn.replay.device.estimate import Deployment, KnownError
from sojourn.replay.sizing.answer import Question, refused, sized
from sojourn.replay.sizing.load import plain_load
from sojourn.replay.verdict.plan import Search
from sojourn.ui.figures.tradeoff import throughput_against_tpot
from tests.loadgen.search.test_curve import POINTS, search
from tests.replay.device.simulated_device import FormulaDevice
from tests.replay.verdict.test_plan import LOAD, RECORDED_RPS, Server

OBJECTIVES = [{"klass": "all", "ttft_ms": 500.0, "tpot_ms": 20.0}]
ERROR = KnownError(cell="any", measurements=9, median=0.1, p90=0.2, bias=0.0, low=0.8, high=1.5)


@pytest.fixture(scope="module")
def answer():
    device = FormulaDevice()
    device.deployment, device.error = Deployment(model="tiny-model", device="formula", tensor_parallel=2), ERROR
    question = Question(objectives=OBJECTIVES, has_split=False, has_bounds=False, usd_per_hour=2.0)
    return sized(find_model("tiny-model"), plain_load(64, 16, 3000), None, device, question)


def read(found):
    return list(csv.DictReader(io.StringIO(curve_csv(found))))


def test_a_simulated_point_times_its_devices_is_its_trial_and_reads_back(answer):
    rows = read(sized_curves([answer, refused(answer.deployment, "no")], OBJECTIVES, 0.9))
    trials = {trial.rate_rps: trial for trial in answer.limit.trials}
    kept = [rate for rate, trial in trials.items() if trial.keeps_up]
    assert [float(row["rate_rps"]) for row in rows] == sorted(kept)
    for row in rows:
        trial = trials[float(row["rate_rps"])]
        assert float(row["output_tokens_per_s_per_device"]) * int(row["devices"]) == trial.output_tokens_per_s
        assert float(row["tokens_per_s_per_user"]) == 1000 / trial.tpot_ms["p90"]
        assert float(row["median_tokens_per_s_per_user"]) == 1000 / trial.tpot_ms["p50"]
        assert float(row["tpot_most_ms"]) == pytest.approx(1.5 * trial.tpot_ms["p90"])
        assert float(row["attainment"]) == trial.attainment and row["source"] == "simulated"


def test_a_point_that_its_interval_leaves_out_is_drawn_within_the_axes(answer):
    """Times that are known to be too short have an interval of longer ones alone."""
    error = msgspec.structs.replace(ERROR, low=8.0, high=9.0)
    fig = throughput_against_tpot(
        sized_curves([msgspec.structs.replace(answer, error=error)], OBJECTIVES, 0.9), per_user=True
    )
    most = max(x for trace in fig.data if trace.mode == "markers+text" for x in trace.x)
    assert fig.layout.xaxis.range[1] > most


def test_a_load_that_is_not_kept_up_with_is_named_and_not_drawn(answer):
    lost = [msgspec.structs.replace(each, keeps_up=False) for each in answer.limit.trials]
    limit = msgspec.structs.replace(answer.limit, trials=lost)
    (found,) = sized_curves([msgspec.structs.replace(answer, limit=limit, own=None)], OBJECTIVES, 0.9)
    assert not found.points and len(found.left_out) == len(lost) and all(BACKLOG in each for each in found.left_out)


def test_a_plan_a_size_and_a_sweep_have_the_same_columns_and_a_purchase_its_own_devices(answer):
    plan = Search(Server(), OBJECTIVES, 0.9, LOAD).run({"max_num_seqs": [24]}, {"second": Change(replicas=2)})
    found = planned_curves(plan, OBJECTIVES, 0.9, RECORDED_RPS, {"": 2, "second": 4}, {"": 3.6})
    assert [curve.label for curve in found] == ["recorded settings", "best settings: max_num_seqs=24", "second"]
    rows = read(found)
    for others in (sized_curves([answer], OBJECTIVES, 0.9), curves({"a": search(POINTS)})):
        assert list(read(others)[0]) == list(rows[0])
    totals = {
        (name, RECORDED_RPS * each.rate): each.prediction.output_tokens_per_s
        for name, points in (("recorded settings", plan.recorded), (found[1].label, plan.best), *plan.tried.items())
        for each in points
    }  # fmt: skip
    for row in rows:
        total = float(row["output_tokens_per_s_per_device"]) * int(row["devices"])
        assert total == pytest.approx(totals[row["configuration"], float(row["rate_rps"])])
        assert int(row["devices"]) == (4 if row["configuration"] == "second" else 2)
    best, second = ([row for row in rows if row["configuration"].startswith(name)] for name in ("best", "second"))
    assert max(float(each["rate_rps"]) for each in second) > 1.5 * max(float(each["rate_rps"]) for each in best)
    assert any(BACKLOG in each for each in found[0].left_out), "1.4 times the limit of better settings"
