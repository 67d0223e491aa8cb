"""The search for the largest rate, against a queue whose true capacity is known in closed form."""

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.loadgen.search.bisection import (
    Goal,
    Outcome,
    Proposal,
    Trial,
    bracket_sentence,
    fewest_to_meet,
    judge,
    next_trial,
    trial_sentence,
)  # fmt: skip
from sojourn.metrics.statistics.dependent_samples import effective_samples, growing, t_quantile, t_tail
from tests.further import further

SERVICE_S = 0.1


def attainment_md1(rate_rps: float, bound_s: float) -> float:
    """P(wait ≤ bound) of M/D/1 (Erlang, 1909)."""
    load = rate_rps * SERVICE_S
    if load >= 1:
        return 0.0
    terms = [rate_rps * (bound_s - k * SERVICE_S) for k in range(int(bound_s / SERVICE_S) + 1)]
    return (1 - load) * sum((-x) ** k / math.factorial(k) * math.exp(x) for k, x in enumerate(terms))


def true_capacity(bound_s: float, attainment: float) -> float:
    low, high = 0.0, 1 / SERVICE_S
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if attainment_md1(middle, bound_s) >= attainment else (low, middle)
    return low


def waits(rate_rps: float, count: int, random: np.random.Generator) -> np.ndarray:
    """Waits of M/D/1 that begins empty, without the first quarter: as `sojourn capacity` runs a trial."""
    begun = count // 3
    due = np.cumsum(random.exponential(1 / rate_rps, count + begun))
    place = np.arange(count + begun)
    return (np.maximum.accumulate(due - place * SERVICE_S) + place * SERVICE_S - due)[begun:]


def trial_of(proposal: Proposal, waited: np.ndarray, bound_s: float) -> Trial:
    return Trial(
        rate_rps=proposal.rate_rps, sent=len(waited), completed=len(waited), good=int((waited <= bound_s).sum()),
        effective=effective_samples(waited), growing=growing(waited), warm_up=proposal.warm_up,
    )  # fmt: skip


def trial(step: Proposal, good: int, sent: int = 200, **changes) -> Trial:
    """All served, and independent of each other."""
    given = {"rate_rps": step.rate_rps, "sent": sent, "completed": sent, "good": good, "effective": float(sent)}
    return Trial(**given | {"warm_up": step.warm_up} | changes)


def search(goal: Goal, run: Callable[[Proposal], Trial]) -> tuple[Outcome, list[Trial]]:
    trials: list[Trial] = []
    for _ in range(goal.most_trials + 2):
        step = next_trial(trials, goal)
        if isinstance(step, Outcome):
            return step, trials
        trials.append(run(step))
    raise AssertionError("the search did not end")


@pytest.mark.parametrize(
    ("seeds", "most_wrong", "fewest_resolved"), [(range(40), 2, 14), *further((range(40, 200), 8, 56))]
)
def test_the_bracket_holds_the_true_capacity_of_a_queue(seeds, most_wrong, fewest_resolved):
    """Each seed has a bound and a start of its own: 95 % of all brackets are true, also of the unresolved."""
    wrong, resolved = [], 0
    for seed in seeds:
        random = np.random.default_rng(seed)
        bound_s, goal = random.uniform(0.2, 0.8), Goal(start_rps=random.uniform(0.3, 20), tolerance=0.15)

        def run(step, bound_s=bound_s, random=random):
            return trial_of(step, waits(step.rate_rps, 600, random), bound_s)

        outcome, _ = search(goal, run)
        truth = true_capacity(bound_s, goal.attainment)
        resolved += outcome.resolved
        if not (outcome.meets_rps or 0) <= truth <= (outcome.misses_rps or math.inf):
            wrong.append((seed, outcome.meets_rps, truth, outcome.misses_rps))
        if outcome.resolved:
            assert outcome.misses_rps / outcome.meets_rps <= 1.15 + 1e-9
    assert len(wrong) <= most_wrong, wrong
    assert resolved >= fewest_resolved, (
        resolved
    )  # the others say that the samples cannot tell, or that the trials ran out


def cliff(capacity_rps: float, step: Proposal) -> Trial:
    """A server that keeps everything up to its capacity, and nothing above."""
    return trial(step, good=200 * (step.rate_rps <= capacity_rps))


@given(st.floats(0.02, 5_000), st.floats(0.05, 500), st.sampled_from([0.02, 0.1, 0.5]))
@settings(max_examples=150)
def test_a_sharp_bound_is_found_from_any_start_within_the_tolerance(capacity_rps, start_rps, tolerance):
    goal = Goal(start_rps=start_rps, tolerance=tolerance)
    outcome, trials = search(goal, lambda step: cliff(capacity_rps, step))
    assert outcome.resolved, outcome.reason
    assert outcome.meets_rps <= capacity_rps < outcome.misses_rps <= outcome.meets_rps * (1 + tolerance) * 1.0001
    assert trials[0].warm_up and not any(trial.warm_up for trial in trials[1:])


@pytest.mark.parametrize(
    ("capacity_rps", "says"), [(1e9, "nothing up to 64 misses"), (1e-9, "no rate down to")], ids=["above", "below"]
)
def test_a_bound_outside_of_what_was_tried_is_never_resolved(capacity_rps, says):
    outcome, trials = search(Goal(highest_rps=64), lambda step: cliff(capacity_rps, step))
    assert not outcome.resolved and says in outcome.reason
    assert (outcome.meets_rps is None) != (outcome.misses_rps is None)
    assert max(trial.rate_rps for trial in trials) <= 64


def test_a_server_that_serves_nobody_ends_the_search_at_once_with_its_error():
    outcome, trials = search(Goal(), lambda step: trial(step, 0, completed=0, error="HTTP 400: no such model"))
    assert not outcome.resolved and outcome.meets_rps is None
    assert "none of 400 requests was served" in outcome.reason
    assert outcome.reason.endswith(": HTTP 400: no such model")
    assert len(trials) == 2


def test_a_rate_at_which_the_server_dies_is_a_miss_however_much_it_kept_before():
    def run(step):
        return cliff(1e9, step) if step.rate_rps < 20 else trial(step, 195, valid=True, died=True, error="exit code -9")

    outcome, _ = search(Goal(), run)
    assert outcome.resolved and outcome.meets_rps < 20 <= outcome.misses_rps
    assert {each.died for each in outcome.judgements if each.verdict == "misses"} == {"exit code -9"}


def test_trials_that_could_not_be_sent_are_counted_and_their_reason_is_given():
    lost, _ = search(Goal(lowest_rps=0.2), lambda step: trial(step, 0, valid=False, error="sent late"))
    assert "could not send even 0.25 requests/s: sent late" in lost.reason

    def run(step):
        return cliff(1e9, step) if step.rate_rps < 20 else trial(step, 0, valid=False, error="sent late")

    few, trials = search(Goal(most_trials=6), run)
    assert (
        len(trials) == 7 and "6 trials were not enough, 1 of them not sent as they were meant (sent late)" in few.reason
    )


def test_a_cold_start_fails_the_warm_up_only():
    served = []

    def run(step):
        served.append(step)
        return cliff(40, step) if len(served) > 1 else trial(step, 0, completed=0, error="HTTP 503")

    outcome, trials = search(Goal(), run)
    assert outcome.resolved and outcome.meets_rps <= 40 < outcome.misses_rps
    assert trials[0].good == 0 and not [
        each for each in outcome.judgements if each.rate_rps == 1 and not each.attainment
    ]


def test_a_load_generator_that_cannot_send_is_not_taken_for_a_server_that_misses():
    def run(step):
        return cliff(1e9, step) if step.rate_rps < 20 else trial(step, 0, valid=False, error="sent late")

    outcome, trials = search(Goal(), run)
    assert not outcome.resolved and outcome.misses_rps is None
    assert "the load generator could not send 22.6274: sent late" in outcome.reason
    assert outcome.meets_rps >= 8 and len(trials) < 15


def test_a_rate_that_cannot_be_sent_between_two_that_can_ends_the_search():
    def run(step):
        known = cliff(30, step)
        spoilt = trial(step, 0, valid=False)
        return spoilt if 18 < step.rate_rps < 31 else known

    outcome, trials = search(Goal(), run)
    assert not outcome.resolved and outcome.meets_rps >= 16 and outcome.misses_rps == 32
    assert "could not send" in outcome.reason and len(trials) < 15


def test_a_rate_that_is_too_near_to_tell_is_tried_again_and_then_left():
    def run(step):
        good = 100 if step.rate_rps < 7 else 90 if step.rate_rps < 9 else 0
        return trial(step, good, sent=100)

    goal = Goal(tolerance=0.05, most_trials_a_rate=4)
    outcome, trials = search(goal, run)
    assert not outcome.resolved and "too near to 90% to decide" in outcome.reason
    assert outcome.meets_rps < 7 and outcome.misses_rps >= 9 and outcome.undecided_rps
    assert max(sum(trial.rate_rps == rate for trial in trials) for rate in outcome.undecided_rps) == 4


def test_latencies_that_grow_cannot_meet():
    step = Proposal(rate_rps=4, why="")
    kept = trial(step, 500, sent=500)
    assert judge([kept], Goal()).verdict == "meets"
    grown = trial(step, 500, sent=500, growing=True)
    assert judge([grown], Goal()).verdict == "cannot tell"
    random = np.random.default_rng(1)
    assert growing(waits(12, 400, random)) and not any(growing(waits(5, 400, random)) for _ in range(50))


@pytest.mark.parametrize("most_trials", [40, *further(20, 200)])
def test_a_wrong_verdict_near_the_bound_is_as_rare_as_its_confidence_says(most_trials):
    """A rate just below the capacity can only be called a miss wrongly, one just above only a meet; a search has as
    many verdicts as trials, and one in twenty searches may have a wrong one."""
    goal, bound_s = Goal(most_trials=most_trials), 0.5
    rate = true_capacity(bound_s, 0.9)
    random = np.random.default_rng(3)
    step = Proposal(rate_rps=rate, why="")
    told = [judge([trial_of(step, waits(rate, 600, random), bound_s)], goal).verdict for _ in range(1_000)]
    allowed = 1_000 * 0.05 / most_trials
    for wrong in ("meets", "misses"):
        assert told.count(wrong) <= allowed + 3 * math.sqrt(allowed) + 1


def test_more_trials_leave_each_verdict_a_smaller_part_of_the_error():
    seen = [trial(Proposal(rate_rps=4, why=""), 480, sent=500)]
    lows = [judge(seen, Goal(most_trials=most)).low for most in (2, 40, 1_000)]
    assert lows == sorted(lows, reverse=True) and lows[0] > lows[1] + 0.005 and lows[1] > lows[2] + 0.005


def test_dependent_answers_count_as_fewer():
    random = np.random.default_rng(0)
    alone = random.normal(size=2_000)
    carried = np.empty(2_000)
    carried[0] = 0
    for place in range(1, 2_000):
        carried[place] = 0.9 * carried[place - 1] + alone[place]
    assert effective_samples(alone) > 1_000
    assert 30 < effective_samples(carried) < 150  # an autocorrelation time of 19: 105, and cautiously fewer


def test_quantiles_of_students_t_are_those_of_the_tables():
    table = {(0.975, 4): 2.776, (0.95, 10): 1.812, (0.995, 8): 3.355, (0.975, 30): 2.042, (0.975, 1): 12.706,
             (0.975, 2): 4.303}  # fmt: skip
    for (probability, degrees), value in table.items():
        assert t_quantile(probability, degrees) == pytest.approx(value, rel=0.01)
        assert t_tail(value, degrees) == pytest.approx(1 - probability, rel=0.05)


@pytest.mark.parametrize("most_trials", [5, 40, 1000])
def test_as_many_good_requests_as_it_takes_meet_and_one_fewer_cannot_tell(most_trials):
    goal = Goal(most_trials=most_trials)
    enough = fewest_to_meet(goal)
    verdicts = [judge([good_trial(number)], goal).verdict for number in (enough, enough - 1)]
    assert verdicts == ["meets", "cannot tell"]


def good_trial(number: int) -> Trial:
    return Trial(rate_rps=4.0, sent=number, completed=number, good=number, effective=float(number))


def test_a_search_that_saw_only_good_requests_says_how_many_it_takes():
    goal = Goal(start_rps=4.0, most_trials=5)
    outcome, _ = search(goal, lambda step: msgspec.structs.replace(good_trial(8), warm_up=step.warm_up))
    assert not outcome.resolved and "met their objectives to 100.0%; 90% takes at least 55" in outcome.reason
    assert bracket_sentence(outcome, goal) == "no tested rate meets 90% or fails it with 95% confidence"
    assert trial_sentence(good_trial(8), outcome.judgements).startswith("8 of 8 requests met their objectives; 4 requ")


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 11, 12, 47])
@pytest.mark.parametrize("start", [1.0, 8.0])
def test_search_for_sessions_tries_whole_numbers_and_ends_between_two_neighbours(capacity, start):
    goal = Goal(unit="sessions", start_rps=start, lowest_rps=1.0, tolerance=0.01)

    def run(step: Proposal) -> Trial:
        assert step.rate_rps == int(step.rate_rps) >= 1
        return trial(step, good=200 if step.rate_rps <= capacity else 20)

    found, _ = search(goal, run)
    assert (found.meets_rps, found.misses_rps) == (capacity or None, capacity + 1)
    assert found.resolved == bool(capacity)
    expected = f"{capacity} sessions meet 90%; {capacity + 1} sessions fail it"
    assert expected in bracket_sentence(found, goal) or not capacity


@pytest.mark.parametrize("centre", [2, 3, 12])
def test_search_for_sessions_tries_the_neighbours_of_a_number_that_stays_undecided(centre):
    goal = Goal(unit="sessions", start_rps=float(centre), lowest_rps=1.0, tolerance=0.01, most_trials_a_rate=2)

    def run(step: Proposal) -> Trial:
        return trial(step, good=200 if step.rate_rps < centre else 180 if step.rate_rps == centre else 20)

    found, trials = search(goal, run)
    tried = {each.rate_rps for each in trials}
    assert {centre - 1, centre + 1} <= tried
    assert not found.resolved and f"at {centre} sessions keep 90.0%" in found.reason


def test_search_for_sessions_goes_up_from_a_number_that_sends_too_few_requests_to_be_sure():
    goal = Goal(unit="sessions", start_rps=1.0, lowest_rps=1.0, tolerance=0.01, most_trials_a_rate=1)

    def run(step: Proposal) -> Trial:
        sent = int(10 * step.rate_rps)  # 30 good ones are not enough to be sure, 80 are
        return trial(step, good=sent if step.rate_rps <= 13 else 0, sent=sent)

    found, _ = search(goal, run)
    assert found.resolved and (found.meets_rps, found.misses_rps) == (13, 14)
