"""The largest rate that keeps an attainment: which rate to try next, from the trials so far. Pure: it runs nothing.

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
    """`4 requests/s meet 90% (95 % confidence); 8 fail it`."""
    low, high, share = outcome.meets_rps, outcome.misses_rps, f"{goal.attainment:.0%}"
    sure = f"{goal.confidence:.0%} confidence"
    if low is None and high is None:
        return f"no tested rate meets {share} or fails it with {sure}"
    met = f"no tested rate meets {share}" if low is None else f"{low:g} requests/s meet {share}"
    missed = "no tested rate fails it" if high is None else f"{high:g} requests/s fail it"
    return f"{met}; {missed} ({sure})"


def trial_sentence(trial: Trial, known: Sequence[Judgement]) -> str:
    """What a trial has come to, and what is known of its rate with it."""
    if not trial.valid:
        return f"not counted: {trial.error}"
    result = f"{trial.good:,} of {trial.sent:,} requests met their objectives"
    each = next((each for each in known if each.rate_rps == trial.rate_rps), None)
    if trial.warm_up or each is None:
        return f"{result}; not counted"
    return f"{result}; {each.rate_rps:g} requests/s so far: {each.low:.1%}–{each.high:.1%}, {each.verdict}"


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


def next_trial(trials: Sequence[Trial], goal: Goal) -> Proposal | Outcome:
    """What to try next, or how the search ended."""
    if not trials:
        return Proposal(rate_rps=goal.start_rps, why="warm-up, not counted", warm_up=True)
    known = judgements(trials, goal)
    tried = [each.rate_rps for each in known]
    meets = [each.rate_rps for each in known if each.verdict == "meets"]
    misses = [each.rate_rps for each in known if each.verdict == "misses"]
    unclear = {each.rate_rps: each for each in known if each.verdict == "cannot tell"}
    high = min(misses, default=None)
    low = max((rate for rate in meets if high is None or rate < high), default=None)
    bracket = low or 0.0, high or math.inf
    undecided = [rate for rate in unclear if bracket[0] < rate < bracket[1]]

    def end(reason: str, resolved: bool = False) -> Outcome:
        return Outcome(
            resolved=resolved, meets_rps=low, misses_rps=high, undecided_rps=undecided, reason=reason, judgements=known
        )

    if high is not None and max(meets, default=0.0) > high:
        return end(
            f"{max(meets):g} requests/s meet and {high:g} miss: attainment does not fall with the rate, or the server "
            "changed during the search"
        )
    if low is not None and high is not None and high / low - 1 <= goal.tolerance:
        return end(f"{low:g} requests/s meet and {high:g} miss", resolved=True)
    counted = [trial for trial in trials if not trial.warm_up]
    if counted and not any(trial.completed for trial in trials):
        return end(_nothing_served(trials))
    unsent = [trial for trial in counted if not trial.valid]
    if len(counted) >= goal.most_trials:
        lost = f", {len(unsent)} of them not sent as they were meant ({unsent[-1].error})" if unsent else ""
        best = next((unclear[rate] for rate in undecided if unclear[rate].attainment >= goal.attainment), None)
        seen = (
            f": {best.sent:,} requests at {best.rate_rps:g} requests/s met their objectives to {best.attainment:.1%}; "
            f"{goal.attainment:.0%} takes at least {fewest_to_meet(goal):,} independent samples, and requests that "
            "overlap in the queue count as fewer"
            if best is not None and not best.growing
            else ""
        )
        return end(f"{len(counted)} trials were not enough{lost}{seen}; allow more, or longer ones")
    spoilt = [trial.rate_rps for trial in unsent]
    retry = next(
        (rate for rate in spoilt if spoilt.count(rate) < ATTEMPTS_AT_INVALID and bracket[0] < rate < bracket[1]), None
    )
    if retry is not None and retry not in tried:
        return Proposal(rate_rps=retry, why="once more: the load was not sent as it was meant")
    again = [rate for rate in undecided if unclear[rate].trials < goal.most_trials_a_rate]
    if again:
        each = unclear[again[0]]
        found = "latencies grow" if each.growing and each.low >= goal.attainment else f"{each.low:.1%}–{each.high:.1%}"
        return Proposal(rate_rps=again[0], why=f"more samples: {found} so far")
    ceiling = min((rate for rate in spoilt if rate not in tried), default=math.inf)
    smallest, largest = min(tried, default=goal.start_rps), max(tried, default=goal.start_rps)
    if not known and ceiling == math.inf:
        return Proposal(rate_rps=goal.start_rps, why="the start")
    if low is None:
        lower = float(f"{min(smallest, ceiling) / STEP_FACTOR:.4g}")
        if lower >= goal.lowest_rps:
            return Proposal(rate_rps=lower, why="nothing meets yet")
        if not known:
            return end(f"the load generator could not send even {ceiling:g} requests/s: {unsent[-1].error}")
        return end(f"no rate down to {smallest:g} requests/s keeps {goal.attainment:.0%}; the bound is below, or 0")
    cause = unsent[-1].error if unsent else ""
    if high is None:
        return _upwards(low, largest, ceiling, cause, goal, end)
    return _between(low, high, undecided, unclear, ceiling, cause, goal, end)


def _nothing_served(trials: Sequence[Trial]) -> str:
    sent = sum(trial.sent for trial in trials)
    error = next((trial.error for trial in reversed(trials) if trial.error), "")
    return (
        f"none of {sent:,} requests was served (mend that, or begin at a lower rate if they were too many)"
        f"{f': {error}' if error else ''}"
    )


def _upwards(low: float, largest: float, ceiling: float, cause: str, goal: Goal, end) -> Proposal | Outcome:
    top = min(goal.highest_rps, ceiling / math.sqrt(STEP_FACTOR))
    higher = min(largest * STEP_FACTOR, top)
    if higher > largest * (1 + goal.tolerance / 2):
        return Proposal(rate_rps=higher, why="nothing misses yet")
    if ceiling < goal.highest_rps:
        return end(f"{low:g} requests/s meet, and the load generator could not send {ceiling:g}: {cause}")
    return end(f"{low:g} requests/s meet, and nothing up to {largest:g} misses; the bound is above what was tried")


def _between(low, high, undecided, unclear, ceiling, cause: str, goal: Goal, end) -> Proposal | Outcome:
    """Bisection. Around the rate that is nearest to the bound and stays undecided, the two rates that would make a
    bracket just narrow enough."""
    top = min(high, ceiling)
    if top < high and top / low - 1 <= goal.tolerance:
        return end(
            f"{low:g} requests/s meet, {high:g} miss, and between them the load generator could not send {ceiling:g}: "
            f"{cause}"
        )
    if not undecided:
        middle = float(f"{math.sqrt(low * top):.4g}")
        return Proposal(rate_rps=middle, why=f"between {low:g} and {top:g}")
    centre = min(undecided, key=lambda rate: abs(unclear[rate].attainment - goal.attainment))
    reach = math.sqrt(1 + goal.tolerance) * 0.999
    for wanted in (centre / reach, centre * reach):
        rate = float(f"{wanted:.4g}")
        known = any(abs(math.log(rate / other)) < math.log(reach) / 4 for other in undecided)
        if not known and low < rate < high and rate < ceiling:
            return Proposal(rate_rps=rate, why=f"beside {centre:g}, which is too near to decide")
    each = unclear[centre]
    return end(
        f"{each.sent} requests at {each.rate_rps:g} requests/s keep {each.attainment:.1%} "
        f"({each.low:.1%}–{each.high:.1%}), too near to {goal.attainment:.0%} to decide; allow more trials a rate, "
        "or a wider tolerance"
    )
