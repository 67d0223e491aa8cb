"""The largest rate, or number of sessions, that keeps an attainment: which one to try next, from the
trials so far. Pure: it runs nothing.

Exponential probing from a start rate, then bisection. A rate is judged by the interval of its attainment, not by the
attainment; while that cannot tell, the same rate is tried again. The result names the bracket it rests on, and is
`resolved` only where a rate that meets and a rate that misses lie close enough together.
"""

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from sojourn.metrics.statistics.dependent_samples import t_quantile
from sojourn.metrics.statistics.intervals import wilson_bounds

Verdict = Literal["meets", "misses", "cannot tell"]
STEP_FACTOR = 2.0  # of exponential probing
REQUESTS_PER_S, SESSIONS = "requests/s", "sessions"  # what is searched
ATTEMPTS_AT_INVALID = 2  # a machine that was busy for a moment spoils one trial, not the search


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """What is searched. `confidence` is that the bracket of a resolved search holds the true rate."""

    attainment: float = 0.9
    confidence: float = 0.95
    start_rps: float = 1.0
    lowest_rps: float = 0.01
    highest_rps: float = 10_000.0
    tolerance: float = 0.15  # resolved when misses / meets - 1 is at most this
    most_trials: int = 40
    most_trials_a_rate: int = 10
    unit: Literal["requests/s", "sessions"] = REQUESTS_PER_S  # of sessions all rates are whole numbers

    def level(self, value: float, up: bool = False) -> float:
        """A rate to try, to four digits; of sessions a whole number."""
        if self.unit == SESSIONS:
            return float(max(1, math.ceil(value) if up else math.floor(value)))
        return float(f"{value:.4g}")

    def is_narrow(self, low: float, high: float) -> bool:
        """Whether nothing needs to be tried between the two."""
        return high / low - 1 <= self.tolerance or (self.unit == SESSIONS and high - low <= 1)


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """One run at one rate. `effective` samples say as much as the `sent` do: see `effective_samples`."""

    rate_rps: float
    sent: int
    completed: int
    good: int
    effective: float
    growing: bool = False  # latencies grew to the end: what a longer run would have shown is worse
    valid: bool = True  # the load was sent as it was meant
    died: bool = False  # the server did, whatever it had kept until then
    error: str = ""  # why it was not valid, how the server died, or what requests failed of most often
    warm_up: bool = False  # not counted


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What all trials at a rate say."""

    rate_rps: float
    verdict: Verdict
    attainment: float
    low: float
    high: float
    sent: int
    trials: int
    growing: bool
    died: str = ""  # how the server did


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """The next trial."""

    rate_rps: float
    why: str
    warm_up: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a search ended. The largest rate that keeps the attainment lies between `meets_rps` and `misses_rps`."""

    resolved: bool
    meets_rps: float | None
    misses_rps: float | None
    undecided_rps: list[float]
    reason: str
    judgements: list[Judgement]


def fewest_to_meet(goal: Goal) -> int:
    """How many independent requests, all of them good, it takes to be sure that a rate keeps the objectives."""
    number, tail = 1, (1 - goal.confidence) / goal.most_trials
    while wilson_bounds(1.0, number, t_quantile(1 - tail, max(3.0, number / 2)))[0] < goal.attainment:
        number += 1
    return number


def bracket_sentence(outcome: Outcome, goal: Goal) -> str:
    """`4 requests/s meet 90% (95% confidence); 8 fail it`."""
    low, high, share = outcome.meets_rps, outcome.misses_rps, f"{goal.attainment:.0%}"
    sure = f"{goal.confidence:.0%} confidence"
    if low is None and high is None:
        return f"no tested rate meets {share} or fails it with {sure}"
    met = f"no tested rate meets {share}" if low is None else f"{low:g} {goal.unit} meet {share}"
    missed = "no tested rate fails it" if high is None else f"{high:g} {goal.unit} fail it"
    return f"{met}; {missed} ({sure})"


def trial_sentence(trial: Trial, known: Sequence[Judgement], unit: str = REQUESTS_PER_S) -> str:
    """What a trial has come to, and what is known of its rate with it."""
    if not trial.valid:
        return f"not counted: {trial.error}"
    result = f"{trial.good:,} of {trial.sent:,} requests met their objectives"
    each = next((each for each in known if each.rate_rps == trial.rate_rps), None)
    if trial.warm_up or each is None:
        return f"{result}; not counted"
    return f"{result}; {each.rate_rps:g} {unit} so far: {each.low:.1%}–{each.high:.1%}, {each.verdict}"


def judge(trials: Sequence[Trial], goal: Goal) -> Judgement:
    """The verdict on one rate. A rate whose latencies grow to the end of half of its trials cannot be said to meet, and
    one at which the server died misses.

    Each trial gives one new verdict, which can be wrong in one direction only: a rate keeps the objectives or does not.
    So the allowed error, shared out between as many verdicts as there may be trials, is that of one tail (Bonferroni).
    """
    sent, good = sum(trial.sent for trial in trials), sum(trial.good for trial in trials)
    share = good / sent if sent else 0.0
    tail = (1 - goal.confidence) / goal.most_trials
    effective = sum(trial.effective for trial in trials)
    low, high = wilson_bounds(share, effective, t_quantile(1 - tail, max(3.0, effective / 2)))
    growing = 2 * sum(trial.growing for trial in trials) >= len(trials)
    died = next((trial.error for trial in trials if trial.died), "")
    verdict: Verdict = "cannot tell"
    if died or high < goal.attainment:
        verdict = "misses"
    elif low >= goal.attainment and not growing:
        verdict = "meets"
    return Judgement(
        rate_rps=trials[0].rate_rps, verdict=verdict, attainment=share, low=low, high=high, sent=sent,
        trials=len(trials), growing=growing, died=died,
    )  # fmt: skip


def judgements(trials: Sequence[Trial], goal: Goal) -> list[Judgement]:
    """Of every rate that was tried, lowest first; warm-up and invalid trials are not counted."""
    by_rate: dict[float, list[Trial]] = {}
    for trial in trials:
        if trial.valid and not trial.warm_up:
            by_rate.setdefault(trial.rate_rps, []).append(trial)
    return [judge(by_rate[rate], goal) for rate in sorted(by_rate)]


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """What the trials say so far. `low` meets and `high` misses, as far as such a rate is known."""

    goal: Goal
    trials: Sequence[Trial]
    known: list[Judgement]
    low: float | None
    high: float | None
    undecided: list[Judgement]  # within the bracket
    unsent: list[Trial]  # not valid
    ceiling: float  # the lowest rate that the load generator never sent as it was meant

    def within(self, rate: float) -> bool:
        return (self.low or 0.0) < rate < (self.high or math.inf)

    @property
    def num_counted(self) -> int:
        return sum(not trial.warm_up for trial in self.trials)

    @property
    def unsent_error(self) -> str:
        return self.unsent[-1].error if self.unsent else ""

    def end(self, reason: str, resolved: bool = False) -> Outcome:
        return Outcome(
            resolved=resolved, meets_rps=self.low, misses_rps=self.high, reason=reason, judgements=self.known,
            undecided_rps=[each.rate_rps for each in self.undecided],
        )  # fmt: skip


def standing_of(trials: Sequence[Trial], goal: Goal) -> Standing:
    known = judgements(trials, goal)
    high = min((each.rate_rps for each in known if each.verdict == "misses"), default=None)
    below = [each.rate_rps for each in known if each.verdict == "meets" and each.rate_rps < (high or math.inf)]
    unsent = [trial for trial in trials if not trial.warm_up and not trial.valid]
    tried = {each.rate_rps for each in known}
    found = Standing(
        goal=goal, trials=trials, known=known, low=max(below, default=None), high=high, undecided=[], unsent=unsent,
        ceiling=min((trial.rate_rps for trial in unsent if trial.rate_rps not in tried), default=math.inf),
    )  # fmt: skip
    unclear = [each for each in known if each.verdict == "cannot tell" and found.within(each.rate_rps)]
    return msgspec.structs.replace(found, undecided=unclear)


def next_trial(trials: Sequence[Trial], goal: Goal) -> Proposal | Outcome:
    """What to try next, or how the search ended: the answer of the first state that the search is in."""
    if not trials:
        return Proposal(rate_rps=goal.start_rps, why="warm-up, not counted", warm_up=True)
    standing = standing_of(trials, goal)
    return next(answer for state in STATES if (answer := state(standing)) is not None)


def _contradicted(at: Standing) -> Outcome | None:
    highest = max((each.rate_rps for each in at.known if each.verdict == "meets"), default=0.0)
    if at.high is None or highest <= at.high:
        return None
    return at.end(
        f"{highest:g} {at.goal.unit} meet and {at.high:g} miss: attainment does not fall with the load, or the server "
        "changed during the search"
    )


def _resolved(at: Standing) -> Outcome | None:
    if at.low is None or at.high is None or not at.goal.is_narrow(at.low, at.high):
        return None
    return at.end(f"{at.low:g} {at.goal.unit} meet and {at.high:g} miss", resolved=True)


def _nothing_served(at: Standing) -> Outcome | None:
    if not at.num_counted or any(trial.completed for trial in at.trials):
        return None
    sent = sum(trial.sent for trial in at.trials)
    error = next((trial.error for trial in reversed(at.trials) if trial.error), "")
    return at.end(
        f"none of {sent:,} requests was served (mend that, or begin at a lower rate if they were too many)"
        f"{f': {error}' if error else ''}"
    )


def _out_of_trials(at: Standing) -> Outcome | None:
    if at.num_counted < at.goal.most_trials:
        return None
    share, seen = at.goal.attainment, ""
    lost = f", {len(at.unsent)} of them not sent as they were meant ({at.unsent_error})" if at.unsent else ""
    best = next((each for each in at.undecided if each.attainment >= share), None)
    if best is not None and not best.growing:
        seen = (
            f": {best.sent:,} requests at {best.rate_rps:g} {at.goal.unit} met their objectives to "
            f"{best.attainment:.1%}; {share:.0%} takes at least {fewest_to_meet(at.goal):,} independent samples, and "
            "requests that overlap in the queue count as fewer"
        )
    return at.end(f"{at.num_counted} trials were not enough{lost}{seen}; allow more, or longer ones")


def _unsent(at: Standing) -> Proposal | None:
    spoilt = [trial.rate_rps for trial in at.unsent]
    retry = next((rate for rate in spoilt if spoilt.count(rate) < ATTEMPTS_AT_INVALID and at.within(rate)), None)
    if retry is None or any(each.rate_rps == retry for each in at.known):
        return None
    return Proposal(rate_rps=retry, why="once more: the load was not sent as it was meant")


def _unclear(at: Standing) -> Proposal | None:
    each = next((each for each in at.undecided if each.trials < at.goal.most_trials_a_rate), None)
    if each is None:
        return None
    grows = each.growing and each.low >= at.goal.attainment
    found = "latencies grow" if grows else f"{each.low:.1%}–{each.high:.1%}"
    return Proposal(rate_rps=each.rate_rps, why=f"more samples: {found} so far")


def _warm(at: Standing) -> Proposal | None:
    return None if at.known or at.unsent else Proposal(rate_rps=at.goal.start_rps, why="the start")


def _downwards(at: Standing) -> Proposal | Outcome | None:
    if at.low is not None:
        return None
    smallest = at.known[0].rate_rps if at.known else at.goal.start_rps
    lower = at.goal.level(min(smallest, at.ceiling) / STEP_FACTOR)
    if at.goal.lowest_rps <= lower < smallest:
        return Proposal(rate_rps=lower, why="nothing meets yet")
    if (higher := _above_a_good_one(at)) is not None:
        return higher
    if not at.known:
        return at.end(f"the load generator could not send even {at.ceiling:g} {at.goal.unit}: {at.unsent_error}")
    return at.end(
        f"no rate down to {smallest:g} {at.goal.unit} keeps {at.goal.attainment:.0%}; the bound is below, or 0"
    )


def _above_a_good_one(at: Standing) -> Proposal | None:
    """One session sends too few requests to be sure of it: where it looks good, more sessions send more."""
    goal = at.goal
    if goal.unit != SESSIONS or not at.known:
        return None
    good = [each.rate_rps for each in at.undecided if each.attainment >= goal.attainment]
    top = min(at.high or math.inf, at.ceiling, STEP_FACTOR**2 * max(good, default=0.0))
    rate = goal.level(math.sqrt(max(good, default=1.0) * top)) if good else 0.0
    tried = {each.rate_rps for each in at.known}
    if not good or rate in tried or rate > goal.highest_rps:
        return None
    return Proposal(rate_rps=rate, why=f"{max(good):g} look good, but send too few requests to be sure")


def _upwards(at: Standing) -> Proposal | Outcome | None:
    if at.high is not None:
        return None
    goal, largest = at.goal, at.known[-1].rate_rps
    higher = min(largest * STEP_FACTOR, goal.highest_rps, at.ceiling / math.sqrt(STEP_FACTOR))
    higher = higher if goal.unit == REQUESTS_PER_S else goal.level(higher)
    if higher > largest * (1 + goal.tolerance / 2):
        return Proposal(rate_rps=higher, why="nothing misses yet")
    met = f"{at.low:g} {goal.unit} meet, and"
    if at.ceiling < goal.highest_rps:
        return at.end(f"{met} the load generator could not send {at.ceiling:g}: {at.unsent_error}")
    return at.end(f"{met} nothing up to {largest:g} misses; the bound is above what was tried")


def _between(at: Standing) -> Proposal | Outcome | None:
    top, is_whole = min(at.high, at.ceiling), at.goal.unit == SESSIONS
    if top < at.high and at.goal.is_narrow(at.low, top):
        return at.end(
            f"{at.low:g} {at.goal.unit} meet, {at.high:g} miss, and between them the load generator could not send "
            f"{at.ceiling:g}: {at.unsent_error}"
        )
    if at.undecided:
        return None
    return Proposal(
        rate_rps=at.goal.level(max(math.sqrt(at.low * top), at.low + 1 if is_whole else 0)),
        why=f"between {at.low:g} and {top:g}",
    )


def _beside_undecided(at: Standing) -> Proposal | Outcome:
    """Around the rate that is nearest to the bound and stays undecided, the two rates that would make a bracket just
    narrow enough."""
    goal = at.goal
    each = min(at.undecided, key=lambda each: abs(each.attainment - goal.attainment))
    centre, reach = each.rate_rps, math.sqrt(1 + goal.tolerance) * 0.999
    for wanted in (centre / reach, centre * reach):
        rate = goal.level(wanted if goal.unit == REQUESTS_PER_S else _beside(centre, wanted), up=wanted > centre)
        near = 1.0 if rate == centre else min(math.log(reach) / 4, 0.9 / rate if goal.unit == SESSIONS else math.inf)
        known = any(abs(math.log(rate / other.rate_rps)) < near for other in at.undecided)
        if not known and at.within(rate) and rate < at.ceiling:
            return Proposal(rate_rps=rate, why=f"beside {centre:g}, which is too near to decide")
    return at.end(
        f"{each.sent} requests at {each.rate_rps:g} {goal.unit} keep {each.attainment:.1%} "
        f"({each.low:.1%}–{each.high:.1%}), too near to {goal.attainment:.0%} to decide; allow more trials a rate, "
        "or a wider tolerance"
    )


def _beside(centre: float, wanted: float) -> float:
    """At least one session beside the centre."""
    return min(wanted, centre - 1) if wanted < centre else max(wanted, centre + 1)


# A state answers None where the search is not in it.
STATES = (
    _contradicted, _resolved, _nothing_served, _out_of_trials, _unsent, _unclear, _warm, _downwards, _upwards, _between,
    _beside_undecided,
)  # fmt: skip
