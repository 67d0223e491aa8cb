"""Which of the proposed causes stand: their fixes are replayed, alone and then on top of each other.

A cause is worth what its fix regains. That alone does not decide: a larger batch regains what a slow device loses, and
twice the devices regain anything. So each suspect is judged by four factors, and their product orders them:

- what it explains of the lost time;
- the weight of the evidence for it;
- what its fix regains, of all that any fix regains. A lack of capacity is judged the other way round: by what no
  setting, no repaired fault and no other arrivals regain;
- its kind: a root before what follows from it (`consequences`), a fault before the setting that would make up for it,
  and a lack of capacity last.

Where more requests failed than were late, the first is a suspect of the failures, whatever the others regain: a replay
has no failures. The first suspect is a cause. Its fix stays in place, and the others are replayed again on top of it:
a second cause is named if it still regains something, or explains what is left.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import SERVED, Excess, failures_lead
from sojourn.diagnosis.suspects import Claims, Name, Suspect, add_claims, divide, own_share
from sojourn.diagnosis.symptoms import TOLERATED_MISSES
from sojourn.diagnosis.trials import Trials, combine
from sojourn.metrics.prediction import Change, Prediction, Predictor
from sojourn.metrics.time_limit import TimeLimit

# A fault beats the setting that would compensate it, and every other explanation beats "too little hardware", which is
# true of whatever is slow.
KIND_FACTOR = {"fault": 1.0, "client": 1.0, "policy": 0.85, "workload": 0.75, "capacity": 0.65}
BESIDE_A_SETTING = 0.65  # of other arrivals, where a setting regains as much: an operator has that in hand
WORTH_NAMING = 0.05  # attainment that a further fix must regain: five points, the error of a good replay
EXPLAINS_OWN = 0.3  # or the share of its own excess that it must explain of what is left
MOST_CAUSES, MOST_ALTERNATIVES = 3, 2
# Suspects that are replayed on top of each cause: as many as there is time for, and never fewer than the most likely
# ones. A verdict must not depend on how busy its machine is.
FEWEST_FURTHER, MOST_FURTHER = 3, 6
ALTERNATIVE = 0.25  # of the first cause's score
PROVED = 0.7  # the support of a cause for which the defining measurement speaks, and little against it
UNKNOWN = 0.6  # what a fix regains, of all that any fix regains, where that is not known
UNDECIDED = 0.5  # the support of a cause for which and against which the same weight of evidence speaks
FOR_BOUNDS = 5  # replays that bounds take
CONSEQUENCE = 0.5  # of the score of a consequence, where one of its roots is a suspect that stands
LEAST = 0.1  # no factor rules a cause out alone: each is measured with an error


@dataclass(slots=True)
class Judged:
    """A suspect with what its fix regains. Shares of the sent requests, 0 to 1."""

    suspect: Suspect
    change: Change | None = None  # the best of its fixes
    prediction: Prediction | None = None
    gain: float | None = None  # attainment that the fix regains alone
    marginal: float | None = None  # attainment that it regains on top of the causes before it
    regained: float = 0.0  # of what any fix regains, 0 to 1
    explained: float = 0.0  # of all that is lost, 0 to 1: of a cause beyond the causes before it
    explains_ms: dict[Name, float] = field(default_factory=dict)
    score: float = 0.0
    alone: float = 0.0  # its score before any cause was certain
    role: str = "cause"

    @property
    def is_estimate(self) -> bool:
        return self.prediction is None


@dataclass(slots=True)
class Judgement:
    """The causes, most important first, then the alternatives; and the replays that decided."""

    causes: list[Judged] = field(default_factory=list)
    alternatives: list[Judged] = field(default_factory=list)
    unchanged: Prediction | None = None
    with_all: Prediction | None = None
    refused: str = ""  # why there was no replay
    left_out: list[str] = field(default_factory=list)  # what there was no time for
    rivals: dict[str, Prediction] = field(default_factory=dict)  # cause → its rival's fix, where that is no suspect


def adjudicate(
    facts: Client, lost: Sequence[Excess], suspects: Sequence[Suspect], predictor: Predictor | None,
    limit: TimeLimit | None = None,
) -> Judgement:  # fmt: skip
    """Orders the suspects and says which of them are causes."""
    trials = Trials(facts, predictor, suspects, limit)
    judged = [_alone(suspect, trials) for suspect in suspects]
    _score(judged, trials)
    result = Judgement(unchanged=trials.unchanged, refused=trials.refused)
    open_, taken, fix = judged, {}, Change()
    leads = _fails_requests if failures_lead(lost) else _any
    while open_ and len(result.causes) < MOST_CAUSES:
        best = max(open_, key=lambda each: (not result.causes and leads(each), each.score))
        if result.causes and not _adds(best, result):
            break
        result.causes.append(best)
        divide(lost, [best.suspect], taken)  # nobody shares with it any more
        _keep(best)
        best.marginal = best.gain if best.marginal is None else best.marginal
        taken = add_claims(taken, best.suspect)
        open_ = [each for each in open_ if each is not best]
        if best.change is not None:
            fix = combine(fix, best.change)
        open_ = _on_top(open_, lost, taken, fix, trials)
        if best.prediction is not None:
            result.with_all = _replay(trials, fix)
    _order(result.causes, leads)
    _bound(result, fix, trials)
    _replay_rivals(result, suspects, trials)
    first = max((each.alone for each in result.causes), default=0.0)
    rest = sorted(open_, key=lambda each: -each.alone)
    result.alternatives = [each for each in rest if _is_alternative(each, first)][:MOST_ALTERNATIVES]
    for each in result.alternatives:
        each.role = "alternative"
    result.left_out = trials.left_out
    return result


def _any(_: Judged) -> bool:
    return True


def _fails_requests(each: Judged) -> bool:
    """Whether it stands as a cause of requests that failed."""
    return each.suspect.support >= UNDECIDED and any(case[0].objective == SERVED for case in each.suspect.cases)


def _order(causes: list[Judged], leads: Callable[[Judged], bool]) -> None:
    """The cause whose fix gains most comes first, after those that lead.

    Those after the first were measured on top of it: only what is clearly more than its gain changes the order.
    """
    if len(causes) > 1 and causes[0].prediction is not None:
        gained = causes[0].gain + WORTH_NAMING
        causes.sort(
            key=lambda each: (not leads(each), -(each.marginal or 0.0) if (each.marginal or 0.0) > gained else 0.0)
        )


def _bound(result: Judgement, fix: Change, trials: Trials) -> None:
    """Replays again what was chosen, often enough for bounds of its own, while there is time."""
    for each in result.causes:
        if each.change is not None and each.prediction is not None and trials.affordable() >= FOR_BOUNDS:
            each.prediction = _replay(trials, each.change, quick=False) or each.prediction
    if result.with_all is not None and trials.affordable() >= FOR_BOUNDS:
        result.with_all = _replay(trials, fix, quick=False) or result.with_all


def _is_alternative(each: Judged, first: float) -> bool:
    """Nearly as good as the first cause; or its own records prove it, though its fix alone regains nothing."""
    proved = each.suspect.support >= PROVED and own_share(*each.suspect.main) >= EXPLAINS_OWN
    return each.alone >= ALTERNATIVE * first or (proved and each.suspect.proposal.kind in ("fault", "policy"))


def _replay_rivals(result: Judgement, suspects: Sequence[Suspect], trials: Trials) -> None:
    """What the rivals' fixes would give: the measurement that separates them has then two predicted outcomes."""
    known = {each.key for each in suspects}
    for each in result.causes:
        proposal = each.suspect.proposal
        if proposal.rival_fix is not None and proposal.rival_key not in known and trials.affordable():
            prediction = _replay(trials, proposal.rival_fix)
            if prediction is not None:
                result.rivals[proposal.key] = prediction


def _replay(trials: Trials, change: Change, *, quick: bool = True) -> Prediction | None:
    """None where the change cannot be replayed: its figures would be those of the unchanged run."""
    (prediction,) = trials.predict([change], quick=quick)
    return None if prediction.is_refused else prediction


def _alone(suspect: Suspect, trials: Trials) -> Judged:
    if trials.usable and not suspect.proposal.in_replay:
        return Judged(suspect, prediction=trials.unchanged, gain=trials.beyond)
    tried = trials.of(suspect)
    if not tried:
        gain = suspect.proposal.gain
        change = suspect.proposal.fixes[0] if suspect.proposal.fixes else None
        return Judged(suspect, change, gain=None if gain is None else gain.share)
    best = max(tried, key=lambda each: trials.progress(each))
    return Judged(suspect, best.change, best, gain=trials.gain(best))


def _score(judged: Sequence[Judged], trials: Trials) -> None:
    """Sets `regained` and `score` of each."""
    worth = {id(each): _worth(each, trials) for each in judged}
    # What the replay itself does not lose, no fix regains in it: then all that are replayed regain little of it
    most = max([*worth.values(), trials.regained_beyond()], default=0.0)
    if most > 0:  # where no fix regains what a good replay can tell, the best of them regains next to nothing
        most = max(most, WORTH_NAMING)
    others = max((worth[id(each)] for each in judged if each.suspect.proposal.kind != "capacity"), default=0.0)
    for each in judged:
        if most <= 0 or (each.suspect.proposal.kind == "capacity" and not trials.usable):
            each.regained = UNKNOWN  # an estimate cannot tell what hardware alone would regain
        elif each.suspect.proposal.kind == "capacity":
            each.regained = min(worth[id(each)], max(0.0, most - others)) / most
        else:
            each.regained = worth[id(each)] / most
    by_settings = max((each.regained for each in judged if _is_proved_setting(each)), default=0.0)
    standing = {each.suspect.key for each in judged if each.suspect.support >= UNDECIDED}
    for each in judged:
        is_beside = each.suspect.proposal.kind == "workload" and _changes_arrivals(each)
        factor = KIND_FACTOR[each.suspect.proposal.kind]
        if is_beside and by_settings >= each.regained:
            factor = BESIDE_A_SETTING
        each.score = factor * each.suspect.support * max(LEAST, each.suspect.explained) * max(LEAST, each.regained)
        each.score *= _as_consequence(each, standing)
        each.alone = each.score
        _keep(each)


def _is_proved_setting(each: Judged) -> bool:
    return each.suspect.proposal.kind == "policy" and each.suspect.support >= PROVED and each.prediction is not None


def _changes_arrivals(each: Judged) -> bool:
    return each.change is not None and each.change.arrivals != "recorded"


def _as_consequence(each: Judged, standing: set[str]) -> float:
    return CONSEQUENCE if each.suspect.follows & standing else 1.0


def _keep(each: Judged) -> None:
    """What it explains now; later divisions are about what is left."""
    each.explained, each.explains_ms = each.suspect.explained, dict(each.suspect.explains_ms)


def _worth(each: Judged, trials: Trials) -> float:
    if trials.usable and not each.suspect.proposal.in_replay:
        return trials.regained_beyond()
    return trials.progress(each.prediction) if each.prediction is not None else max(0.0, each.gain or 0.0)


def _on_top(open_: list[Judged], lost: Sequence[Excess], taken: Claims, fix: Change, trials: Trials) -> list[Judged]:
    """The suspects that are left, judged anew with the causes before them mended."""
    divide(lost, [each.suspect for each in open_], taken)
    tried = [each for each in open_ if each.prediction is not None and each.suspect.proposal.in_replay]
    tried.sort(key=lambda each: -each.alone)
    tried = tried[: max(FEWEST_FURTHER, min(MOST_FURTHER, trials.affordable() - 1))]
    before, *after = trials.predict([fix, *(combine(fix, each.change) for each in tried)]) if tried else (None,)
    for each, prediction in zip(tried, after, strict=True):
        if (
            not prediction.is_refused and not before.is_refused
        ):  # two settings may exclude each other: that says nothing of either cause
            each.marginal = prediction.attainment.median - before.attainment.median
    for each in open_:
        left, gained = each.suspect.explained, max(0.0, each.marginal or 0.0)
        each.score = KIND_FACTOR[each.suspect.proposal.kind] * each.suspect.support * max(left, gained)
    return open_


def _adds(each: Judged, result: Judgement) -> bool:
    """Whether a further cause is worth a name: its fix adds a gain, or without a replay it explains what is left."""
    if each.suspect.proposal.kind == "capacity" and any(
        one.suspect.proposal.kind == "capacity" for one in result.causes
    ):
        return False
    if each.marginal is not None:  # two faults may each hide what the other costs; a fix that harms alone mends none
        return each.marginal >= WORTH_NAMING and each.gain > -WORTH_NAMING
    alone = WORTH_NAMING if each.prediction is None else each.gain
    if each.suspect.support < UNDECIDED or alone < WORTH_NAMING:
        return False
    if each.suspect.follows & {one.suspect.key for one in result.causes}:  # mended with its root
        return False
    mended = result.with_all if each.suspect.proposal.in_replay else None  # what no replay has, none shows mended
    for excess, proposal in each.suspect.cases:
        if excess.objective == SERVED:  # a lost request has no time to divide
            explains = own_share(excess, proposal)
        else:
            explains = each.suspect.explains_ms.get(excess.name, 0.0) / max(excess.total_ms, 1e-9)
        if explains >= EXPLAINS_OWN and _still_lost(excess, mended):
            return True
    return False


def _still_lost(excess: Excess, mended: Prediction | None) -> bool:
    """Whether a class still loses requests after the fixes of the causes so far."""
    if mended is None:
        return True
    kept = mended.attainment_by_class.get(excess.klass)
    return kept is None or kept.median < 1 - TOLERATED_MISSES
