"""The figures of a score, on verdicts whose score is known."""

import pytest

from sojourn.diagnosis.confidence import confidence
from sojourn.diagnosis.score.calibration import Sample, fit_confidence, samples_of
from sojourn.diagnosis.score.figures import calibration, figures, smallest_severities
from sojourn.metrics.errors import RunDataError
from tests.diagnosis.score.judgements import KV, TOKENISER, cause, control, fault, judged, said

# Of four runs that count the first cause is right in two, and the lifecycle in three; one fault did not hurt.
SOME = [
    judged(fault(repeat=0), said("kv_pool", seconds=1.0)),
    judged(fault(repeat=1), said("kv_pool", seconds=2.0)),
    judged(fault(severity=2), said(cause("batch_cap", lifecycle="memory"), "kv_pool", seconds=9.0)),
    judged(fault(TOKENISER, case="tokeniser"), said(state="inconclusive")),
    judged(fault(case="mild"), said("overload"), attainment=0.95),
    judged(control(), said(state="healthy"), attainment=0.98),
    judged(control(case="chat-heavy"), said("overload", state="overloaded"), attainment=0.95),
]


def test_shares_count_the_runs_that_a_criterion_applies_to():
    found = figures("steps", SOME)
    assert (found.runs, found.faults, found.controls, found.left_out) == (7, 4, 2, 1)
    shares = found.shares
    assert (shares["first"].right, shares["first"].judged) == (2, 4)
    assert (shares["lifecycle"].right, shares["among_three"].right) == (3, 3)
    assert (shares["false_alarm"].right, shares["false_alarm"].judged) == (1, 2)
    assert (shares["remedy"].right, shares["remedy"].judged) == (0, 3)
    assert shares["both"].share is None and found.no_cause.right == 1
    assert found.median_seconds == 0.0 and found.largest_seconds == 9.0


def test_repeats_of_one_case_narrow_no_interval():
    three, one = (figures("steps", [judged(fault(repeat=n), said("kv_pool")) for n in range(count)]).shares["first"]
                  for count in (3, 1))  # fmt: skip
    assert three.independent == one.independent == 1 and (three.low, three.high) == (one.low, one.high)
    # Wilson, one success of one trial: 1 / (1 + 1.96²) to 1
    assert one.low == pytest.approx(1 / (1 + 1.959964**2), rel=1e-5) and one.high == 1.0


def test_confusions_have_the_truth_in_the_rows():
    found = figures("steps", SOME)
    assert found.lifecycle_confusion == {"memory": {"memory": 3}, "token": {"nothing": 1}}
    assert found.cause_confusion == {"kv_pool": {"kv_pool": 2, "batch_cap": 1}, "slow_tokeniser": {"nothing": 1}}
    assert found.by_severity["2"]["first"].right == 0 and found.by_severity["1"]["first"].judged == 3
    assert found.by_workload["chat"]["false_alarm"].judged == 2


def test_smallest_severity_is_one_that_most_repeats_find():
    faults = [judged(fault(severity=s, repeat=r), said("kv_pool" if right else "overload"))
              for s, repeats in ((1, [True, False]), (2, [True, True, False]), (3, [True])) for r, right in
              enumerate(repeats)]  # fmt: skip
    assert smallest_severities(faults) == {"kv": 2}
    assert smallest_severities([judged(fault(), said("overload"))]) == {"kv": None}


def test_calibration_puts_each_confidence_into_one_range():
    found = calibration([(0.8, True), (0.8, True), (0.8, True), (0.8, False), (1.0, True), (0.0, False), (None, True)])
    assert found.said == 6 and found.brier == pytest.approx((3 * 0.04 + 0.64) / 6)
    around = next(each for each in found.bins if each.above < 0.8 <= each.up_to)
    assert (around.right, around.said, around.mean_confidence) == (3, 4, pytest.approx(0.8))
    assert sum(each.said for each in found.bins) == 6 and calibration([]) is None


def sample(fault: str, support: float, right: bool) -> Sample:
    return Sample(fault=fault, features={"support": support, "noise": 0.5}, right=right, is_first=True)


def test_fit_learns_what_was_right_and_judges_each_fault_by_the_others():
    usual = [sample(f"f{n}", support, right) for n in range(10) for support, right in ((1.0, True), (0.0, False))]
    odd = [sample("odd", 1.0, False)]  # strongly supported, and wrong
    fit = fit_confidence(usual + odd)
    assert fit.faults == 11 and fit.samples == 21
    sure, unsure = (confidence({"support": support}, fit.coefficients) for support in (1.0, 0.0))
    assert sure > 0.7 > 0.3 > unsure
    # A fit that has not seen the odd one is surer of it than the fit that has
    wrong = next(each for each in fit.held_out.bins if each.right == 0 and each.above > 0.5)
    assert wrong.said == 1 and wrong.mean_confidence > sure
    with pytest.raises(RunDataError, match="needs 20"):
        fit_confidence(usual[:4])


def test_a_feature_that_speaks_against_its_meaning_is_left_out():
    fit = fit_confidence([sample(f"f{n}", float(n % 2), not n % 2) for n in range(30)])
    assert "support" not in fit.coefficients


def test_samples_are_the_named_causes_with_features():
    features = {"support": 1.0}
    verdict = said(cause("kv_pool", features=features), cause("overload", features=features),
                   cause("batch_cap", features=features, is_cause=False), "slow_tokeniser")  # fmt: skip
    found = samples_of([judged(fault(KV), verdict), judged(control(), verdict, 0.98), judged(fault(), verdict, 0.98)])
    assert [(each.fault, each.right, each.is_first) for each in found] == [
        ("kv_pool", True, True), ("kv_pool", False, False), ("chat", False, True), ("chat", False, False)
    ]  # fmt: skip
