"""Each criterion of the score counts what it says, and nothing else."""

import pytest

from sojourn.diagnosis.score.judgement import leads_to
from sojourn.diagnosis.score.said import said_of
from sojourn.diagnosis.score.truth import Remedy
from tests.diagnosis.score.judgements import KV, TOKENISER, cause, control, fault, judged, said


def test_first_finding_decides_lifecycle_cause_and_kind():
    right = judged(fault(), said("kv_pool", "overload"))
    assert (right.lifecycle, right.first, right.among_three, right.kind) == (True, True, True, True)
    wrong = judged(fault(), said("overload", "kv_pool"))
    assert (wrong.lifecycle, wrong.first, wrong.among_three, wrong.kind) == (False, False, True, True)
    assert judged(fault(), said("overload", "batch_cap", "own_prefill", "kv_pool")).among_three is False
    assert judged(fault(TOKENISER), said(cause("slow_tokeniser", kind="capacity"))).kind is False


def test_another_answer_that_is_right_counts_as_the_best_one():
    other = judged(fault(), said(cause("block_leak", lifecycle="memory")))
    assert other.first and other.said_key == "kv_pool" and other.said_lifecycle == "memory"
    assert judged(fault(), said("overload")).said_key == "overload"


def test_verdict_without_a_finding_is_wrong_but_may_blame_the_right_lifecycle():
    silent = judged(fault(), said(state="inconclusive", bottleneck="memory"))
    assert silent.lifecycle and not silent.first and not silent.kind and silent.remedy is False
    assert silent.said_key == "nothing"
    assert judged(fault(), said(state="healthy")).lifecycle is False


def test_of_two_faults_both_have_to_be_named_among_three():
    record = fault(KV, TOKENISER)
    assert judged(record, said("slow_tokeniser", "kv_pool")).both is True
    one = judged(record, said("slow_tokeniser", "overload", "batch_cap", "kv_pool"))
    assert one.both is False and one.first and one.true_key == "kv_pool + slow_tokeniser"
    assert judged(fault(), said("kv_pool")).both is None


def test_control_alarms_by_its_state_or_by_a_finding_that_costs_goodput():
    assert judged(control(), said(state="healthy")).false_alarm is False
    assert judged(control(), said("batch_cap", state="healthy")).false_alarm is False
    assert judged(control(), said(cause("batch_cap", goodput_lost=0.05), state="healthy")).false_alarm is True
    assert judged(control(), said(state="inconclusive")).false_alarm is True
    costly = said(cause("overload", goodput_lost=0.6), state="overloaded")
    assert judged(control("overloaded"), costly).false_alarm is False
    assert judged(control("overloaded"), said("kv_pool")).false_alarm is True
    assert judged(control(), said(state="healthy")).first is None


def test_fault_counts_where_the_client_lost_ten_points_against_its_base():
    assert judged(fault(), said("kv_pool"), attainment=0.85, base=0.97).counts
    assert not judged(fault(), said("kv_pool"), attainment=0.90, base=0.97).counts
    assert judged(fault(), said("kv_pool"), attainment=0.89, base=None).counts
    assert judged(control(), said(state="healthy"), attainment=0.97).counts
    assert not judged(control(), said(state="healthy"), attainment=0.7).counts
    assert judged(control("overloaded"), said("overload"), attainment=0.2).counts
    assert not judged(control("overloaded"), said("overload"), attainment=0.95).counts


def test_remedy_has_to_set_the_setting_to_the_right_side():
    for blocks, right in ((256, True), (32, False), (64, False)):
        assert judged(fault(), said(cause("kv_pool", settings={"num_kv_blocks": blocks}))).remedy is right
    assert judged(fault(), said(cause("kv_pool", settings={"max_num_seqs": 32}))).remedy is False
    assert judged(fault(TOKENISER), said("slow_tokeniser")).remedy is None


@pytest.mark.parametrize(
    ("direction", "planted", "proposed", "right"),
    [
        ("larger", 16, None, True), ("smaller", None, 512, True), ("larger", None, 512, False),
        ("smaller", "auto", 256, True), ("other", "static", "fcfs", True), ("other", "fcfs", "fcfs", False),
        ("larger", False, True, True),
    ],
)  # fmt: skip
def test_an_unbounded_setting_stands_above_every_number(direction, planted, proposed, right):
    remedy = Remedy(setting="x", direction=direction)
    assert leads_to(remedy, {"x": proposed}, {"x": planted}) is right


def finding(**fields):
    against = {"statement": "s", "value": 1.0, "unit": "", "supports": False, "source": "steps"}
    fix = {"change": "max_num_seqs=32, policy=fcfs", "gain": "", "basis": ""}
    return {"object": "batch cap", "lifecycles": ["request", "compute"], "kind": "policy", "cause": "full",
            "goodput_lost": 0.5, "fix": fix, "evidence": [against]} | fields  # fmt: skip


def test_a_written_diagnosis_is_read_with_and_without_a_replayed_change():
    document = {"state": "degraded", "headline": "h", "bottleneck": None, "findings": [finding(), finding(
        key="batch_cap", confidence=0.8, change={"settings": {"max_num_seqs": 16}}, role="alternative",
        confidence_features={"support": 1.0})]}  # fmt: skip
    old, new = said_of(document, 0.5).causes
    assert old.settings == {"max_num_seqs": 32, "policy": "fcfs"} and old.key == "batch cap"
    assert new.settings == {"max_num_seqs": 16} and new.key == "batch_cap" and new.confidence == 0.8
    assert not new.is_cause and new.features == {"support": 1.0} and not new.evidence[0].supports
    assert said_of(document, 0.5).lifecycle == "request"
