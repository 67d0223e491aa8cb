"""Between proposed causes the replays of their fixes decide, and no millisecond is explained twice."""

from dataclasses import replace

import msgspec
import pandas as pd
import pytest

from sojourn.diagnosis.adjudicate import adjudicate
from sojourn.diagnosis.confidence import FEATURES, coefficients, confidence
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.findings import findings
from sojourn.diagnosis.proposal import Gain, Proposal
from sojourn.diagnosis.suspects import Suspect, add_claims, divide
from sojourn.diagnosis.trials import combine
from sojourn.diagnosis.verdict import evidence, support_of
from sojourn.metrics.prediction import Change, Interval, NoPredictor, Prediction
from sojourn.metrics.time_limit import TimeLimit
from tests.metrics.synthetic import synthetic_run

BATCH, FASTER, EVEN = Change(settings={"max_num_seqs": 8}), Change(device_speed=2.0), Change(arrivals="even")
CHUNK = Change(settings={"max_prefill_chunk_tokens": 64})
QUEUE = {"request.queue": 1.0}


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    return read_evidence(synthetic_run(tmp_path_factory.mktemp("run") / "run", requests=30))


class Scripted:
    """A predictor with known answers: what each change, or any with its settings, regains of the lost half."""

    def __init__(self, regains, measured: float):
        self.regains, self.measured, self.asked = regains, measured, []

    def predict(self, changes, *, quick=False):
        self.asked += changes
        return [self._one(change) for change in changes]

    def _one(self, change: Change) -> Prediction:
        gained = max((gain for each, gain in self.regains if combine(each, change) == change), default=0.0)
        gained += sum(extra for each, extra in getattr(self, "extras", ()) if combine(each, change) == change)
        each = Interval(*[min(1.0, self.measured + gained)] * 3)
        same = {"p50": each, "p90": Interval(10.0, 10.0, 10.0), "p99": each}
        return Prediction(change=change, attainment=each, goodput_rps=each, ttft_ms=same, tpot_ms=same, e2e_ms=same,
                          attainment_by_class={"chat": each}, output_tokens_per_s=1.0, preemptions=0, is_trusted=True,
                          doubts=[])  # fmt: skip


def excess(**accounts) -> Excess:
    named = {name.replace("_", ".", 1): ms for name, ms in accounts.items()}
    return Excess(objective="ttft_ms", klass="chat", bound_ms=100.0, missed=15, sent=30, mean_ms=500.0,
                  baseline="the objective", accounts=named, missing=pd.Index(range(15)))  # fmt: skip


def suspect(key, kind, claims, *fixes, over=None, facts_for=1.0, against=0.0) -> Suspect:
    found = [evidence("for", 1, "share", "a test", weight=facts_for)]
    found += [evidence("against", 1, "share", "a test", supports=False, weight=against)] if against else []
    proposal = Proposal(cause=key, evidence=found, measurement="measure", settings=None, if_cause="a", if_rival="b",
                        claims=claims, fixes=fixes, gain=Gain("some", "a guess", 0.1), lifecycles=("request",),
                        object=key, kind=kind, key=key)  # fmt: skip
    return Suspect(key, [(over or excess(request_queue=400.0), proposal)])


def judged(facts, suspects, regains, extras=()):
    lost = [suspects[0].cases[0][0]]
    divide(lost, suspects, {})
    now = float(facts.rows.good.mean())
    facts = with_attainment(facts, now / 2)
    predictor = Scripted(regains, now / 2)
    predictor.extras = extras
    return adjudicate(facts, lost, suspects, predictor), predictor


def with_attainment(facts, attained: float):
    """The same facts with that share of good requests."""
    rows = facts.rows.copy()
    rows["good"] = [place < attained * len(rows) for place in range(len(rows))]
    return replace(facts, rows=rows)


def keys(found) -> list[str]:
    return [each.suspect.key for each in found]


def test_fault_beats_the_setting_that_would_make_up_for_it(facts):
    pair = [suspect("batch_cap", "policy", QUEUE, BATCH), suspect("slow_device", "fault", QUEUE, FASTER)]
    result, _ = judged(facts, pair, [(BATCH, 0.40), (FASTER, 0.40)])
    assert keys(result.causes)[0] == "slow_device"


def test_fault_whose_repair_regains_nothing_is_not_the_cause(facts):
    pair = [suspect("batch_cap", "policy", QUEUE, BATCH), suspect("slow_device", "fault", QUEUE, FASTER)]
    result, _ = judged(facts, pair, [(BATCH, 0.40), (FASTER, 0.0)])
    assert keys(result.causes)[0] == "batch_cap"


@pytest.mark.parametrize(("regained", "first"), [(0.4, "batch_cap"), (0.01, "overload")])
def test_capacity_is_short_only_if_no_setting_regains(facts, regained, first):
    pair = [suspect("overload", "capacity", QUEUE, FASTER), suspect("batch_cap", "policy", QUEUE, BATCH)]
    result, _ = judged(facts, pair, [(BATCH, regained), (FASTER, 0.45)])
    assert keys(result.causes)[0] == first


def test_evidence_against_changes_the_order(facts):
    pair = [suspect("a", "policy", QUEUE, BATCH, against=4.0), suspect("b", "policy", QUEUE, FASTER)]
    result, _ = judged(facts, pair, [(BATCH, 0.4), (FASTER, 0.4)])
    assert keys(result.causes)[0] == "b"


@pytest.mark.parametrize(("extra", "named"), [(0.2, True), (0.02, False)])
def test_second_cause_is_named_if_its_fix_adds_something(facts, extra, named):
    pair = [suspect("a", "fault", QUEUE, FASTER), suspect("b", "policy", QUEUE, BATCH)]
    result, _ = judged(facts, pair, [(FASTER, 0.2), (BATCH, 0.02)], extras=[(combine(FASTER, BATCH), extra)])
    assert ("b" in keys(result.causes)) is named


def test_second_cause_of_other_time_is_named_without_a_replay(facts):
    over = excess(request_queue=300.0, client_network=300.0)
    pair = [suspect("a", "fault", QUEUE, over=over), suspect("b", "client", {"client.network": 1.0}, over=over)]
    lost = [over]
    divide(lost, pair, {})
    result = adjudicate(facts, lost, pair, None)
    assert set(keys(result.causes)) == {"a", "b"} and "no replay was made" in result.refused


def test_best_candidate_of_a_setting_is_the_fix(facts):
    wider = Change(settings={"max_num_seqs": 16})
    result, _ = judged(facts, [suspect("batch_cap", "policy", QUEUE, BATCH, wider)], [(BATCH, 0.1), (wider, 0.4)])
    assert result.causes[0].change == wider and result.causes[0].gain == pytest.approx(0.4)


def test_no_millisecond_is_explained_twice(facts):
    over = excess(request_queue=300.0, compute_prefill=100.0)
    three = [
        suspect("a", "policy", QUEUE, over=over),
        suspect("b", "fault", {"request.queue": 0.8, "compute.prefill": 1.0}, over=over, facts_for=3.0),
        suspect("c", "workload", {"request.queue": 0.2}, over=over),
    ]
    divide([over], three, {})
    assert sum(each.explains_ms[over.name] for each in three) <= 400.0 + 1e-9
    assert sum(each.explained for each in three) <= 1.0 + 1e-9
    divide([over], three[1:], add_claims({}, three[0]))
    assert sum(each.explains_ms[over.name] for each in three[1:]) == pytest.approx(100.0)


@pytest.mark.parametrize("weight", [0.5, 1.0, 4.0])
def test_more_evidence_never_lowers_and_more_against_never_raises(weight):
    base = [evidence("for", 1, "share", "a test"), evidence("against", 1, "share", "a test", supports=False)]
    more = evidence("more", 1, "share", "a test", weight=weight)
    less = evidence("less", 1, "share", "a test", supports=False, weight=weight)
    assert support_of([*base, less]) < support_of(base) < support_of([*base, more])


def test_run_that_a_replay_cannot_repeat_keeps_its_estimates(facts):
    pair = [suspect("a", "policy", QUEUE, BATCH)]
    lost = [pair[0].cases[0][0]]
    divide(lost, pair, {})
    now = float(facts.rows.good.mean())
    result = adjudicate(facts, lost, pair, Scripted([(BATCH, 0.4)], now - 0.5))
    assert result.causes[0].is_estimate and "replayed unchanged" in result.refused


def test_refused_change_is_no_trial(facts):
    class Refuses(Scripted):
        def _one(self, change):
            found = super()._one(change)
            return msgspec.structs.replace(found, is_refused=change.settings != {})

    pair = [suspect("a", "policy", QUEUE, BATCH)]
    lost = [pair[0].cases[0][0]]
    divide(lost, pair, {})
    result = adjudicate(facts, lost, pair, Refuses([], float(facts.rows.good.mean())))
    assert result.causes[0].is_estimate


def test_fixes_that_exclude_each_other_say_nothing_of_the_second_cause(facts):
    class Excludes(Scripted):
        def _one(self, change):
            return msgspec.structs.replace(super()._one(change), is_refused=len(change.settings) > 1)

    both = excess(request_queue=400.0, request_interference=400.0)
    pair = [suspect("a", "policy", QUEUE, BATCH, over=both),
            suspect("b", "policy", {"request.interference": 1.0}, CHUNK, over=both)]  # fmt: skip
    divide([both], pair, {})
    now = float(facts.rows.good.mean()) / 2
    predictor = Excludes([(BATCH, 0.3), (CHUNK, 0.2)], now)
    result = adjudicate(with_attainment(facts, now), [both], pair, predictor)
    assert keys(result.causes) == ["a", "b"] and result.causes[1].marginal == result.causes[1].gain
    assert result.with_all is None


def test_lost_requests_are_a_further_cause_that_explains_them(facts):
    late = excess(request_queue=400.0)
    lost = replace(late, objective=SERVED, accounts={}, error="HTTP 503", missing=pd.Index(range(15, 30)))
    slow, died = suspect("slow_device", "fault", QUEUE, FASTER), suspect("core_death", "fault", {}, over=lost)
    died.cases[0] = (lost, replace(died.proposal, explained=1.0, in_replay=False))
    divide([late, lost], [slow, died], {})
    now = float(facts.rows.good.mean()) / 2
    for predictor in (None, Scripted([(FASTER, 0.4)], now + 0.2)):
        result = adjudicate(with_attainment(facts, now), [late, lost], [slow, died], predictor)
        assert set(keys(result.causes)) == {"slow_device", "core_death"}


@pytest.mark.parametrize(("failed", "late"), [(29, 1), (16, 14), (15, 15), (14, 16), (3, 27)])
@pytest.mark.parametrize("regained", [None, 0.0, 0.4])
def test_what_fails_more_requests_than_are_late_comes_first_whatever_a_fix_regains(facts, failed, late, regained):
    slowed = replace(excess(request_queue=400.0), missed=late, missing=pd.Index(range(late)))
    lost = replace(slowed, objective=SERVED, accounts={}, error="HTTP 503", missed=failed,
                   missing=pd.Index(range(late, late + failed)))  # fmt: skip
    died = suspect("core_death", "fault", {}, over=lost)
    died.cases[0] = (lost, replace(died.proposal, explained=1.0, in_replay=False))
    pair = [suspect("slow_device", "fault", QUEUE, FASTER, over=slowed), died]
    divide([slowed, lost], pair, {})
    now = float(facts.rows.good.mean()) / 2
    predictor = None if regained is None else Scripted([(FASTER, regained)], now)
    result = adjudicate(with_attainment(facts, now), [slowed, lost], pair, predictor)
    if failed > late:
        assert keys(result.causes)[0] == "core_death"
    elif regained:
        assert keys(result.causes)[0] == "slow_device"


def test_run_that_cannot_be_replayed_says_why(facts):
    one = suspect("a", "policy", QUEUE, BATCH)
    lost = [one.cases[0][0]]
    divide(lost, [one], {})
    result = adjudicate(facts, lost, [one], NoPredictor("the run has too many steps"))
    assert result.causes[0].is_estimate and result.refused == "the run has too many steps"


def test_measurement_is_that_of_the_fix_which_the_replays_chose(facts):
    wider = Change(settings={"max_num_seqs": 32, "priority_ageing": None})
    one = suspect("batch_cap", "policy", QUEUE, BATCH, wider)
    of, proposal = one.cases[0]
    one.cases[0] = (of, replace(proposal, settings={"max_num_seqs": 8}, command="sojourn run chat"))
    result, _ = judged(facts, [one], [(BATCH, 0.1), (wider, 0.4)])
    (found,) = findings(facts, result)
    assert found.fix.change == "max_num_seqs=32, priority_ageing=null"
    assert found.probe.measurement == f"the same scenario with {found.fix.change}"
    assert found.probe.command.endswith("--set max_num_seqs=32 --set priority_ageing=null")
    assert found.probe.if_cause == found.fix.gain


def test_both_changes_are_in_a_combined_one():
    both = combine(Change(settings={"a": 1, "b": 2}, device_speed=2.0), Change(settings={"b": 3, "c": 4}, kv_scale=2))
    assert both.settings == {"a": 1, "b": 2, "c": 4} and both.device_speed == 2.0 and both.kv_scale == 2


def test_confidence_has_a_coefficient_for_each_feature_and_grows_with_what_is_regained():
    assert set(coefficients()) == {"intercept", *FEATURES}
    least, most = dict.fromkeys(FEATURES, 0.0), dict.fromkeys(FEATURES, 1.0)
    assert 0 < confidence(least) < confidence(most) < 1


def test_cause_that_gains_clearly_more_on_top_of_the_first_comes_first(facts):
    pair = [suspect("a", "fault", QUEUE, FASTER), suspect("b", "policy", QUEUE, BATCH)]
    result, _ = judged(facts, pair, [(FASTER, 0.06), (BATCH, 0.05)], extras=[(combine(FASTER, BATCH), 0.3)])
    assert keys(result.causes) == ["b", "a"]


def test_fix_of_a_rival_that_nobody_proposed_is_replayed(facts):
    one = suspect("batch_cap", "policy", QUEUE, BATCH)
    excess_of, proposal = one.cases[0]
    one.cases[0] = (excess_of, replace(proposal, rival_key="overload", rival_fix=FASTER))
    result, _ = judged(facts, [one], [(BATCH, 0.4), (FASTER, 0.1)])
    assert result.rivals["batch_cap"].change == FASTER


def test_setting_that_makes_the_run_healthy_is_enough_though_hardware_regains_more(facts):
    """Of 45 lost in a hundred, the setting regains all but the tolerated tenth."""
    pair = [suspect("overload", "capacity", QUEUE, FASTER), suspect("tenant_share", "policy", QUEUE, BATCH)]
    result, _ = judged(facts, pair, [(BATCH, 0.42), (FASTER, 0.5)])
    assert keys(result.causes)[0] == "tenant_share" and result.causes[0].regained == 1.0


@pytest.mark.parametrize(("kept_more", "first"), [(0.4, "block_leak"), (0.0, "kv_pool")])
def test_cause_that_no_replay_has_regains_what_the_replay_keeps_more_than_the_run(facts, kept_more, first):
    leak, pool = suspect("block_leak", "fault", QUEUE), suspect("kv_pool", "policy", QUEUE, BATCH)
    of, proposal = leak.cases[0]
    leak.cases[0] = (of, replace(proposal, in_replay=False))
    divide([of], [leak, pool], {})
    now = float(facts.rows.good.mean()) / 2
    result = adjudicate(with_attainment(facts, now), [of], [leak, pool], Scripted([(BATCH, 0.3)], now + kept_more))
    assert keys(result.causes)[0] == first
    alone = adjudicate(with_attainment(facts, now), [of], [leak], Scripted([], now + kept_more))
    assert not alone.causes[0].is_estimate, "the run replayed unchanged is the run without the leak"
    if kept_more:
        assert result.causes[0].gain == pytest.approx(kept_more, abs=0.02) and not result.causes[0].is_estimate


class Slow(Scripted):
    """Each replay takes some seconds of a clock of its own; one that would end too late is broken off."""

    def __init__(self, regains, measured, each_s):
        super().__init__(regains, measured)
        self.now, self.each_s = 0.0, each_s
        self.limit = TimeLimit(7.0, lambda: self.now)

    def predict(self, changes, *, quick=False):
        self.now += self.each_s * len(changes)
        self.limit.check()
        return super().predict(changes, quick=quick)


@pytest.mark.parametrize(("each_s", "replays"), [(0.01, None), (2.0, 3), (9.0, 0)])
def test_replays_end_with_their_time_limit_and_the_verdict_says_so(facts, each_s, replays):
    three = [suspect(name, "policy", QUEUE, Change(settings={"max_num_seqs": place}), CHUNK)
             for place, name in enumerate("abc", start=8)]  # fmt: skip
    lost = [three[0].cases[0][0]]
    divide(lost, three, {})
    now = float(facts.rows.good.mean())
    slow = Slow([(CHUNK, 0.2)], now / 2, each_s)
    result = adjudicate(with_attainment(facts, now / 2), lost, three, slow, slow.limit)
    assert result.causes and slow.now <= slow.limit.seconds + each_s
    assert len(slow.asked) == replays or (replays is None and not result.left_out)
    assert (replays is None) == (not result.left_out)
    assert all("--thorough" in each for each in result.left_out)
    assert bool(result.refused) == (replays == 0)
