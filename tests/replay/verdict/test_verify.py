"""A pair of runs tests a prediction: which one, whether it held, and when a pair tests none."""

import json
import math
from dataclasses import replace

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sojourn.metrics.errors import InputError
from sojourn.metrics.prediction import Change, Interval, Prediction
from sojourn.metrics.run.directory import RunDirectory
from sojourn.replay.predictor import predictor_of
from sojourn.replay.verdict.changed import changed_settings
from sojourn.replay.verdict.differences import differences
from sojourn.replay.verdict.ledger import score
from sojourn.replay.verdict.measured import measured_figures
from sojourn.replay.verdict.verify import (
    Claim,
    check_comparable,
    checked_figures,
    chosen_claim,
    claims,
    verified,
)  # fmt: skip
from tests.metrics.synthetic import PLANTS, synthetic_run
from tests.replay.simulated_run import random_asks, write_run

CAP = {"max_num_seqs": 18}


def prediction(settings: dict, attainment=(0.8, 0.9, 1.0), **latencies) -> Prediction:
    def quantiles(name: str) -> dict[str, Interval]:
        return {"p50": Interval(*latencies[name])} if name in latencies else {}

    return Prediction(
        change=Change(settings=settings), attainment=Interval(*attainment), goodput_rps=Interval(1, 5, 9),
        ttft_ms=quantiles("ttft_ms"), tpot_ms=quantiles("tpot_ms"), e2e_ms=quantiles("e2e_ms"), attainment_by_class={},
        output_tokens_per_s=1.0, preemptions=0, is_trusted=True, doubts=[],
    )  # fmt: skip


class Predicts:
    """Predicts the same of every change, and counts."""

    def __init__(self) -> None:
        self.asked: list[Change] = []

    def check(self, change): ...

    def predict(self, changes, *, quick=False):
        self.asked += changes
        return [prediction(dict(change.settings)) for change in changes]


@pytest.fixture
def pair(tmp_path):
    """The same load on the same server, twice, the second time with a larger batch."""
    few = replace(PLANTS["healthy"], settings=replace(PLANTS["healthy"].settings, max_num_seqs=2))
    runs = [synthetic_run(tmp_path / name, plant=plant, requests=40)
            for name, plant in (("a", few), ("b", replace(few, settings=replace(few.settings, **CAP))))]  # fmt: skip
    return runs


def diagnosed(*stated: Prediction, rival: Prediction | None = None) -> dict:
    findings = [{"key": "batch_cap", "prediction": msgspec.to_builtins(each), "rival_key": "overload",
                 "rival_prediction": msgspec.to_builtins(rival)} for each in stated]  # fmt: skip
    return {"findings": findings}


def test_a_hit_and_a_miss_are_told_from_the_figures_of_the_second_run(pair):
    measured = measured_figures(pair[1])
    for low, high, is_hit in ((0.9, 1.0, True), (0.2, 0.4, False)):
        (claim,) = claims(diagnosed(prediction(CAP, (low, low, high))))
        entry = verified(*pair, claim).entry
        assert entry.hit is is_hit and entry.figures[0].name == "attainment"
        assert entry.error == pytest.approx(measured["attainment"] - low)
        assert (entry.run, entry.run2, entry.predicted_by, entry.cause) == ("a", "b", "diagnosis", "batch_cap")
        assert entry.figures[0].before < entry.figures[0].measured


def test_the_diagnosis_is_tested_if_its_fix_is_what_differs(pair):
    changed = changed_settings(*(run.meta() for run in pair))
    assert changed == {"max_num_seqs": (2, 18)}
    predictor = Predicts()
    stated = claims(diagnosed(prediction({"max_num_seqs": 4}), prediction(CAP)))
    claim, notes = chosen_claim(changed, stated, lambda: predictor)
    assert claim.predicted_by == "diagnosis" and not notes and not predictor.asked
    claim, notes = chosen_claim(changed, stated[:1], lambda: predictor)
    assert claim.predicted_by == "replay" and predictor.asked == [Change(settings=CAP)]
    assert "max_num_seqs=4, which is not what differs" in notes[0]
    claim, _ = chosen_claim(changed, claims(diagnosed(prediction({}), rival=prediction(CAP))), lambda: predictor)
    assert (claim.predicted_by, claim.cause) == ("rival", "overload")


def test_a_fault_or_a_limit_of_a_tenant_that_differs_is_a_change():
    before = {"engine": {"port": 1, "faults": "slow_host:ms=9", "access": "a.yaml"}}
    assert changed_settings(before, {"engine": {"port": 2, "access": "a.yaml"}}) == {"faults": ("slow_host:ms=9", None)}
    assert "access" in changed_settings(before, {"engine": {"access": "b.yaml"}})


def test_settings_that_a_running_server_states_of_itself_are_compared():
    def loaded(**settings):
        return {"engine": {"base_url": "http://x", "model": "m", "served": {"engine": settings}}}

    before = loaded(max_num_seqs=2, num_kv_blocks=64, memory_bytes={"weights": 1}, policy="fcfs")
    after = loaded(max_num_seqs=8, num_kv_blocks=256, memory_bytes={"weights": 2}, policy="fcfs")
    assert changed_settings(before, after) == {"max_num_seqs": (2, 8)}
    assert changed_settings(before, loaded()) == {}


@pytest.mark.parametrize(
    ("change", "says"),
    [({"seed": 7}, "--seed 0"), ({"objectives": []}, "objectives differ"), ({"arrivals": "x"}, "arrivals differ")],
)
def test_runs_of_another_load_are_not_comparable(pair, change, says):
    meta = pair[1].meta()
    if "arrivals" in change:
        meta["scenario"] |= change
    else:
        meta |= change
    (pair[1].path / "run.json").write_text(json.dumps(meta))
    with pytest.raises(InputError, match=says):
        check_comparable(*pair)


def test_a_field_that_an_older_version_did_not_write_is_no_other_load(pair):
    meta = pair[1].meta()
    meta["objectives"][0]["note"] = "new"
    (pair[1].path / "run.json").write_text(json.dumps(meta))
    assert check_comparable(*pair) == []


def test_an_invalid_run_is_compared_with_a_note_and_a_run_never_with_itself(pair):
    pair[1].update_meta(valid=False, invalid_reasons=["sent 44 ms late"])
    assert any("b is not valid" in note and "sent 44 ms late" in note for note in check_comparable(*pair))
    with pytest.raises(InputError, match="both sides"):
        check_comparable(pair[0], pair[0])


def test_a_share_of_few_requests_may_miss_the_bounds_by_half_a_request():
    stated = prediction(CAP, (0.90, 0.92, 0.94))
    hit = checked_figures(stated, {}, {"attainment": 0.95}, requests=20)[0]
    assert hit.hit and not checked_figures(stated, {}, {"attainment": 0.95}, requests=200)[0].hit


def test_without_objectives_the_median_latency_is_judged():
    stated = prediction(CAP, (math.nan,) * 3, e2e_ms=(90, 100, 110), ttft_ms=(4, 5, 6))
    judged, other = checked_figures(stated, {"e2e_ms:p50": 300.0}, {"e2e_ms:p50": 120.0, "ttft_ms:p50": 5.0}, 9)
    assert (judged.name, judged.hit, judged.error, judged.before) == ("e2e_ms:p50", False, pytest.approx(0.2), 300.0)
    assert other.hit


def test_a_figure_without_a_bound_is_not_judged_and_stays_out_of_the_ledger():
    stated = prediction(CAP, (math.nan, 0.9, 1.0), e2e_ms=(90, 100, 110), ttft_ms=(4, 5, math.inf))
    measured = {"attainment": 0.9, "e2e_ms:p50": 100.0, "ttft_ms:p50": 5.0}
    assert [figure.name for figure in checked_figures(stated, {}, measured, requests=9)] == ["e2e_ms:p50"]


def test_a_diagnosis_on_disk_has_null_for_what_is_not_known():
    stated = json.loads(json.dumps(diagnosed(prediction(CAP, (math.nan,) * 3))).replace("NaN", "null"))
    (claim,) = claims(stated)
    assert math.isnan(claim.prediction.attainment.median)
    assert claims(None) == [] and claims({"findings": [{"prediction": {"change": 3}}]}) == []


def slowed(run, factor: float):
    """The run on a machine that took `factor` times as long for each step."""
    path = run.path / "steps.parquet"
    steps = pq.read_table(path)
    took = [round(factor * ns) for ns in steps["device_ns"].to_pylist()]
    steps = steps.set_column(steps.column_names.index("device_ns"), "device_ns", pa.array(took, pa.int64()))
    pq.write_table(steps, path)
    return RunDirectory(run.path)


@pytest.fixture
def simulated(tmp_path):
    """One load twice, with a smaller batch in the second run."""
    asks = random_asks(3, 150, mean_gap_ns=1_000_000)
    bound = [{"klass": "all", "e2e_ms": 60.0}]
    runs = [
        write_run(tmp_path / name, asks, objectives=bound, max_num_seqs=size) for name, size in (("a", 8), ("b", 2))
    ]
    return [RunDirectory(run.path) for run in runs]


def test_verify_names_the_speed_that_differs_and_judges_the_prediction_for_it(simulated):
    run, run2 = simulated[0], slowed(simulated[1], 3.0)
    predictor = predictor_of(run)
    (said,) = predictor.predict([Change(settings={"max_num_seqs": 2})])
    found = verified(run, run2, Claim(said, "replay", ""), predictor=predictor)
    speed = next(each for each in found.differences if each.name == "speed")
    assert speed.is_different and speed.after == pytest.approx(3.0, rel=0.05) == found.entry.longer
    assert speed.sentence.endswith("times as long in b")
    slow = predictor.predict_at(Change(settings={"max_num_seqs": 2}), run2.table("steps"))
    assert slow.e2e_ms["p50"].median > 2 * said.e2e_ms["p50"].median
    assert found.entry.at_speed.name == "attainment" and found.entry.at_speed.median < said.attainment.median


def test_a_speed_that_a_setting_gives_and_a_step_without_a_time_do_not_hide_the_speed(simulated):
    run, run2 = simulated[0], slowed(simulated[1], 3.0)
    path = run2.path / "steps.parquet"
    steps = pq.read_table(path)
    took = [None, *steps["device_ns"].to_pylist()[1:]]
    pq.write_table(steps.set_column(steps.column_names.index("device_ns"), "device_ns", pa.array(took)), path)
    run2.update_meta(engine=run2.meta()["engine"] | {"threads": 7})
    (speed,) = [each for each in differences(run, run2, predictor_of(run)) if each.name == "speed"]
    assert speed.after == pytest.approx(3.0, rel=0.05)
    assert speed.sentence.endswith("in b; it had other settings that change the speed: threads")


def test_a_run_as_fast_as_the_first_is_judged_twice_alike(simulated):
    run, run2 = simulated
    predictor = predictor_of(run)
    (said,) = predictor.predict([Change(settings={"max_num_seqs": 2})])
    found = verified(run, run2, Claim(said, "replay", ""), predictor=predictor)
    assert not any(each.is_different for each in found.differences) and found.entry.hit and found.entry.at_speed.hit


def test_other_arrivals_are_a_difference(simulated, tmp_path):
    later = write_run(tmp_path / "c", random_asks(4, 150, mean_gap_ns=1_000_000), max_num_seqs=8)
    assert "arrivals" in {each.name for each in differences(simulated[0], later, None) if each.is_different}
    later.update_meta(objectives=simulated[0].meta()["objectives"])
    assert not [note for note in check_comparable(simulated[0], later) if "same moments" in note]  # it is said once


def test_settings_that_change_the_speed_are_verified_with_the_speed_that_is_given():
    predictor, changed = Predicts(), {"threads": (1, 2)}
    claim, _ = chosen_claim(changed, claims(diagnosed(prediction({"threads": 2}))), lambda: predictor, 1.3)
    assert predictor.asked == [Change(settings={"threads": 2}, device_speed=1.3)] and claim.predicted_by == "replay"


def test_what_cannot_be_predicted_is_neither_a_hit_nor_counted(pair):
    (claim,) = claims(diagnosed(prediction(CAP, (0.02, 0.5, 0.99))))
    entry = verified(*pair, claim).entry
    assert entry.is_open and score([entry]).predictions == 0
    (claim,) = claims(diagnosed(prediction(CAP, (0.2, 0.5, 0.99))))
    assert score([entry, verified(*pair, claim).entry]).predictions == 1
