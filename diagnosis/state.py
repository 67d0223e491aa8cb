"""The state of a run and its sentence: healthy, degraded, overloaded, inconclusive or invalid."""

import math
from collections.abc import Sequence

from sojourn.diagnosis.capacity import load
from sojourn.diagnosis.evidence import Client, is_joined, view_of
from sojourn.diagnosis.excess import Excess, attainment, excesses, failures_lead, losses
from sojourn.diagnosis.expectation import is_expectation
from sojourn.diagnosis.foreign_server import what_is_seen
from sojourn.diagnosis.symptoms import TOLERATED_MISSES, significant
from sojourn.diagnosis.validity import Lateness
from sojourn.diagnosis.verdict import LOST_TITLE, NEEDS_SERVER_RECORDS, SEPARATOR, Finding, State
from sojourn.metrics.compare.comparable import SENT_LATE
from sojourn.metrics.request.goodput import unmeasured_objectives
from sojourn.metrics.request.objectives import short
from sojourn.metrics.results.load import rate_was_to_change
from sojourn.metrics.statistics.steadiness import Steadiness

_ADD_OBJECTIVES = {
    "client": "Add `objectives` to the scenario",
    "server": "Start the server with objectives: `sojourn serve MODEL --objective-ttft-ms 500 --objective-tpot-ms 50`",
}
LEAST_SURE = 0.15  # a cause that is wrong six times of seven is no headline
SURE_ENOUGH = 0.5  # a verdict that is as often wrong as right is none
BALANCED = 0.5  # as much weighs for a cause as against it
CLEAR_MARGIN = 0.15  # of the first cause's score, by which the next one must be behind: what evidence is good to
FEWEST_REQUESTS = 20  # below it one request is more than 5%, and no share means much


def state_of(facts: Client, findings: Sequence[Finding], steady: Steadiness, late: Lateness) -> tuple[State, str]:
    """The state and its sentence. A run that is not valid has them, too, if its lateness could not change them."""
    state, sentence = _judge(facts, findings, steady)
    if facts.measured_by == "server" and facts.sent:
        sentence += " (as the server measured it: no client)"
    if not late.reasons:
        return state, sentence
    why = "; ".join(late.reasons)
    if late.no_verdict or late.in_doubt or not facts.served or (late.cut_short and state == "healthy"):
        return "invalid", f"Not valid, measure again: {why}"
    if all(reason.startswith(SENT_LATE) for reason in late.reasons):
        how_late = late.reasons[0].removeprefix(SENT_LATE).strip(": ").split(",")[0]
        return state, (
            f"{sentence}. Not valid: the load was sent late ({how_late}); the verdict is the same with and without "
            "that delay"
        )
    return state, f"{sentence}. Not valid: {why}; the verdict does not depend on that"


def _judge(facts: Client, findings: Sequence[Finding], steady: Steadiness) -> tuple[State, str]:
    """The state and its sentence, the first that applies."""
    attained = attainment(facts)
    if not facts.sent:
        return "inconclusive", "No request was recorded: the run is empty, has only just begun, or is all warm-up"
    error, count = next(iter(facts.errors.items()), ("", 0))
    ended = f"{count} ended with “{error}”"
    if not facts.served:
        return "degraded", f"None of {facts.sent} requests was served: {ended}"
    failed = 1 - facts.served / facts.sent
    costly = [finding for finding in findings if finding.goodput_lost]
    names_failures = bool(costly) and LOST_TITLE in costly[0].title
    fails_first = failed > TOLERATED_MISSES and (not facts.objectives or _failures_lead(facts))
    failing = f"{failed:.0%} of the requests failed: {ended}"
    if fails_first and not names_failures:  # what slows the others is no answer for those that failed
        return "degraded", failing
    if facts.objectives and costly and (open_ := _name_undecided(facts, costly)):
        return "inconclusive", open_
    if findings and findings[0].key == "overload":
        met = f"{attained:.0%} of the requests {_meet(facts)}" + (f", {failed:.0%} failed" if fails_first else "")
        return "overloaded", f"Overloaded: {findings[0].cause}. {met}"
    if fails_first:
        return "degraded", _because(facts, costly[0])
    if failed > TOLERATED_MISSES and not findings:
        return "degraded", failing
    if not facts.objectives:
        return "inconclusive", (
            f"{facts.served} of {facts.sent} requests were served; the run names no objective, so nobody can say "
            f"whether that is good. {_ADD_OBJECTIVES[facts.measured_by]}"
        )
    return _by_objectives(facts, findings, costly, steady)


def _by_objectives(
    facts: Client, findings: Sequence[Finding], costly: Sequence[Finding], steady: Steadiness
) -> tuple[State, str]:
    attained = attainment(facts)
    misses = [excess for excess in excesses(facts) if significant(facts, excess)]
    if not misses and not costly:
        if unknown := _name_unmeasured(facts):
            return "inconclusive", unknown
        klass, least = min(facts.rows.groupby("klass").good.mean().items(), key=lambda item: item[1])
        if min(attained, least) >= 1 - TOLERATED_MISSES:
            return _healthy(facts, attained, findings, steady)
        return "degraded", _lost_in_all(facts, klass)
    if costly:
        return "degraded", _because(facts, costly[0])
    return "inconclusive", _inconclusive(facts, misses[0])


def _failures_lead(facts: Client) -> bool:
    return failures_lead([each for each in (*excesses(facts), *losses(facts)) if significant(facts, each)])


def _because(facts: Client, first: Finding) -> str:
    return f"{_cost(facts, first)}, in the {first.lifecycles[0]} lifecycle, because {first.cause}"


def _cost(facts: Client, found: Finding) -> str:
    """The symptoms of a finding, and how many requests it costs."""
    what = _miss(facts)
    if LOST_TITLE in found.title:
        what = f"failed or {what}" if SEPARATOR in found.title else "failed"
    return f"{found.title}: {found.goodput_lost:.0%} of the requests {what}"


def _name_unmeasured(facts: Client) -> str:
    """The sentence where an objective could be measured of no served request; "" where each was of some."""
    if not (unknown := unmeasured_objectives(facts.rows)):
        return ""
    ways = {"ttfa_ms": "Serve with a reasoning parser, which sends the reasoning apart"}
    way = ways.get(unknown[0], "Stream the answers")
    return (
        f"Cannot tell: {' and '.join(map(short, unknown))} of none of {facts.served} served requests could be "
        f"measured. {way}, or name other objectives"
    )


def _meet(facts: Client) -> str:
    return "take less than twice their own work" if is_expectation(facts.objectives) else "meet their objectives"


def _miss(facts: Client) -> str:
    return "take more than twice their own work" if is_expectation(facts.objectives) else "miss their objective"


def _name_undecided(facts: Client, costly: Sequence[Finding]) -> str:
    """The sentence where two causes explain the same about as well, or the evidence speaks against the first one; ""
    where it stands."""
    first = costly[0]  # a consequence of it is no rival
    rivals = [each for each in costly[1:] if each.role == "alternative" and first.key not in each.follows]
    open_ = f"{_cost(facts, first)}, and why is open. "
    if first.confidence < LEAST_SURE:
        return f"{open_}The likeliest cause is hardly one: {first.cause}. Measure first: {first.probe.measurement}"
    if first.confidence_features.get("support", 1.0) < BALANCED:
        return f"{open_}The evidence speaks against the likeliest cause, {first.cause}. Measure first: " + (
            first.probe.measurement
        )
    if not rivals or first.confidence >= SURE_ENOUGH or first.confidence_features.get("margin", 1.0) >= CLEAR_MARGIN:
        return ""
    return f"{open_}Either {first.cause}; or {rivals[0].cause}. Measure first: {first.probe.measurement}"


def _lost_in_all(facts: Client, klass: str) -> str:
    """The sentence for a class that loses too many requests in all, though no objective alone loses many."""
    rows = facts.rows[facts.rows.klass == klass]
    failed, lost = rows[rows.status != "ok"], int((~rows.good).sum())
    sentence = f"{lost} of {len(rows)} requests{f' of {klass}' if klass else ''} are lost: {lost - len(failed)} late"
    errors = failed.error.fillna(failed.status).value_counts()
    return sentence + (f", {len(failed)} failed, most of them with “{errors.index[0]}”" if len(errors) else "")


def _healthy(facts: Client, attained: float, findings: Sequence[Finding], steady: Steadiness) -> tuple[State, str]:
    good = f"{attained:.0%} of {facts.sent} requests {_meet(facts)}"
    if facts.sent < FEWEST_REQUESTS:
        return "inconclusive", f"{good}, too few for a verdict: measure {FEWEST_REQUESTS} or more"
    grows = f"; {steady.reason}" if steady.queue_grows else ""
    if grows and not rate_was_to_change(facts.meta):
        return "inconclusive", f"{good} until now, but a longer run would be worse{grows}"
    used = load(facts)
    capacity = "" if math.isnan(used) else f" at {used:.0%} of the capacity"
    though = f", though {findings[0].cause}" if findings else ""
    return "healthy", f"Healthy: {good}{capacity}{though}{grows}"


def _inconclusive(facts: Client, excess: Excess) -> str:
    by_ms = excess.mean_ms - excess.bound_ms
    miss = (
        f"{excess.missed} of {excess.sent} requests ({excess.missed / excess.sent:.0%}) miss "
        f"{short(excess.objective)} ≤ {excess.bound_ms:g} ms, by {by_ms:,.{0 if by_ms >= 10 else 1}f} ms on average"
    )
    if not is_joined(facts) and view_of(facts) is not None:
        return f"{miss}. {what_is_seen(facts, excess)}"
    if not is_joined(facts):
        return f"{miss}; {NEEDS_SERVER_RECORDS}"
    ranked = excess.ranked()
    if not ranked:
        return f"{miss}, and no account is above {excess.baseline}: measure more requests first"
    name, share = ranked[0]
    unexplained = "no known cause explains it: look at its slowest requests first"
    return f"{miss}; {share:.0%} of the excess is {name}, and {unexplained}"
