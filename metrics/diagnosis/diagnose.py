"""`diagnose`: one run, or two, to the answer of the main job. Reads records, writes nothing."""

import math
from collections import defaultdict

import msgspec

from metrics.diagnosis.capacity import load
from metrics.diagnosis.compare import devices, product_latency
from metrics.diagnosis.excess import Excess, attainment, excesses
from metrics.diagnosis.facts import Facts, by_lifecycle, closure, read_facts, tightest
from metrics.diagnosis.foreign_server import shares_seen, warnings_of, what_is_seen
from metrics.diagnosis.rules.cause import Explanation, cause_of_symptom, first_cause
from metrics.diagnosis.rules.request import OFFERED_LOAD, overload
from metrics.diagnosis.symptoms import SYMPTOMS, TOLERATED_MISSES, Symptom, check, cohort, late, significant
from metrics.diagnosis.verdict import NEEDS_SERVER_RECORDS, Closure, Diagnosis, Finding, State, SymptomCheck
from metrics.ledger import LIFECYCLES
from metrics.machine.steal import steal_sentence
from metrics.records import NO_END
from metrics.request.goodput import class_goodput
from metrics.request.objectives import short
from metrics.results.energy import run_energy
from metrics.results.load import declared_window_s, load_notes, rate_was_to_change
from metrics.results.summary import results
from metrics.run.directory import RunDirectory
from metrics.run.join import clock_of, uncertainty_sentence
from metrics.sources.registry import SOURCES
from metrics.statistics.steadiness import Steadiness

CLIENT_LAG_WARNS = 0.02  # of the tightest objective; whether it makes the run invalid, run.json says
FEWEST_REQUESTS = 20  # below it one request is more than 5 %, and no share means much
CLOSURE_WARNS = 0.95  # share of the joined requests that must close before the accounts are to be trusted

Explained = tuple[Symptom, Explanation, Excess | None]


def diagnose(run: RunDirectory, against: RunDirectory | None = None) -> Diagnosis:
    """The diagnosis of a run; `against` adds the two symptoms that take a comparison. Raises RunDataError."""
    facts = read_facts(run)
    other = read_facts(against) if against is not None else None
    checks = {symptom.key: check(facts, symptom) for symptom in SYMPTOMS}
    ranked = _findings(facts, checks)
    if other is not None:
        for result, found in (product_latency(facts, other), devices(facts, other)):
            checks[result.symptom] = result
            ranked += [(True, found)] if found else []
    # A cause whose own fix gains nothing goes last, whatever its symptom costs
    findings = [found for _, found in sorted(ranked, key=lambda pair: (not pair[0], -(pair[1].goodput_lost or 0.0)))]
    closed = closure(facts.rows)
    energy = run_energy(run, facts.rows)
    measured = results(facts.rows, facts.meta, energy)
    state, headline = _state(facts, findings, measured.steady)
    if state == "invalid":
        checks = {key: msgspec.structs.replace(each, status="unknown", reason="the run is not valid")
                  for key, each in checks.items()}  # fmt: skip
    account_shares, clocks = shares_seen(facts), clock_of(facts.meta)
    return Diagnosis(
        run=facts.name,
        against=other.name if other else None,
        state=state,
        headline=headline,
        goodput=class_goodput(facts.rows, facts.objectives, declared_window_s(facts.meta)),
        ledger_share=account_shares,
        ttft_share=shares_seen(facts, "ttft"),
        lifecycle_share=by_lifecycle(account_shares),
        bottleneck=_bottleneck(facts, state, findings),
        findings=findings if state != "invalid" else [],
        checks=[checks[symptom.key] for symptom in SYMPTOMS],
        closure=closed,
        warnings=_warnings(facts, closed),
        results=measured,
        energy=energy,
        server=facts.server,
        clock_uncertainty_ms=None if clocks is None or clocks.offset is None else clocks.uncertainty_ns / 1e6,
    )


def _findings(facts: Facts, checks: dict[str, SymptomCheck]) -> list[tuple[bool, Finding]]:
    """Each cause once, and whether its fix would gain anything."""
    explained: dict[str, list[Explained]] = {}
    for symptom in SYMPTOMS:
        if checks[symptom.key].status != "present":
            continue
        above = [excess for excess in late(facts, symptom.key) if significant(facts, excess)]
        causes = [(first_cause(facts, excess), excess) for excess in above]
        for cause, excess in causes or [(cause_of_symptom(facts, symptom.key), None)]:
            if cause is not None:
                explained.setdefault(cause.key, []).append((symptom, cause, excess))
    return [
        (any(excess is None or cause.gain.helps for _, cause, excess in same), _finding(facts, same))
        for same in explained.values()
    ]


def _finding(facts: Facts, same: list[Explained]) -> Finding:
    """One finding of all that has one cause, under the symptom that loses most goodput; its title names them all."""
    ranked = sorted(same, key=lambda each: -(each[2].missed if each[2] is not None else 0))
    symptom, cause, excess = ranked[0]
    lost = set().union(*(each.missing for _, _, each in ranked if each is not None))  # a request counts once
    objective = ""
    if excess is not None:
        objective = f"{short(excess.objective)} ≤ {excess.bound_ms:g} ms"
        objective += f" for {excess.klass}" if excess.klass else ""
    return Finding(
        symptom=symptom.key,
        title=" · ".join(dict.fromkeys(each.title for each, _, _ in ranked)),
        objective=objective,
        cohort=cohort(facts, excess) if excess is not None else "all requests",
        goodput_lost=len(lost) / facts.sent or None,
        **cause.verdict(),
    )


def _state(facts: Facts, findings: list[Finding], steady: Steadiness) -> tuple[State, str]:
    """The state and its sentence, the first that applies."""
    attained = attainment(facts)
    reasons = [str(reason) for reason in facts.meta.get("invalid_reasons") or ()]
    if facts.meta.get("valid") is False and (facts.sent or reasons):
        return "invalid", f"Not valid, measure again: {'; '.join(reasons or ['run.json gives no reason'])}"
    if not facts.sent:
        return "inconclusive", "No request was recorded: the run is empty, has only just begun, or is all warm-up"
    error, count = next(iter(facts.errors.items()), ("", 0))
    ended = f"{count} ended with “{error}”"
    if not facts.served:
        return "degraded", f"None of {facts.sent} requests was served: {ended}"
    failed = 1 - facts.served / facts.sent
    if findings and findings[0].object == OFFERED_LOAD:
        return "overloaded", f"Overloaded: {findings[0].cause}. {attained:.0%} of the requests meet their objectives"
    if failed > TOLERATED_MISSES and (cause := overload(facts, None)) is not None:
        return "overloaded", f"Overloaded: {cause.cause}. {failed:.0%} of the requests failed, {ended}"
    if failed > TOLERATED_MISSES:
        return "degraded", f"{failed:.0%} of the requests failed: {ended}"
    if not facts.objectives:
        return "inconclusive", (
            f"{facts.served} of {facts.sent} requests were served; the scenario names no objective, so nobody can say "
            "whether that is good. Add `objectives`"
        )
    misses = [excess for excess in excesses(facts) if significant(facts, excess)]
    costly = [finding for finding in findings if finding.goodput_lost]
    if not misses and not costly:
        klass, least = min(facts.rows.groupby("klass").good.mean().items(), key=lambda item: item[1])
        if min(attained, least) >= 1 - TOLERATED_MISSES:
            return _healthy(facts, attained, findings, steady)
        return "degraded", _lost_in_all(facts, klass)
    if costly:
        first = costly[0]
        return "degraded", (
            f"{first.title}: {first.goodput_lost:.0%} of the requests miss their objective, in the "
            f"{first.lifecycles[0]} lifecycle, because {first.cause}"
        )
    return "inconclusive", _inconclusive(facts, misses[0])


def _lost_in_all(facts: Facts, klass: str) -> str:
    """The sentence for a class that loses too many requests in all, though no objective alone loses many."""
    rows = facts.rows[facts.rows.klass == klass]
    failed, lost = rows[rows.status != "ok"], int((~rows.good).sum())
    sentence = f"{lost} of {len(rows)} requests{f' of {klass}' if klass else ''} are lost: {lost - len(failed)} late"
    errors = failed.error.fillna(failed.status).value_counts()
    return sentence + (f", {len(failed)} failed, most of them with “{errors.index[0]}”" if len(errors) else "")


def _healthy(facts: Facts, attained: float, findings: list[Finding], steady: Steadiness) -> tuple[State, str]:
    good = f"{attained:.0%} of {facts.sent} requests meet their objectives"
    if facts.sent < FEWEST_REQUESTS:
        return "inconclusive", f"{good}, too few for a verdict: measure {FEWEST_REQUESTS} or more"
    grows = f"; {steady.reason}" if steady.queue_grows else ""
    if grows and not rate_was_to_change(facts.meta):
        return "inconclusive", f"{good} until now, but a longer run would be worse{grows}"
    used = load(facts)
    capacity = "" if math.isnan(used) else f" at {used:.0%} of the capacity"
    though = f", though {findings[0].cause}" if findings else ""
    return "healthy", f"Healthy: {good}{capacity}{though}{grows}"


def _inconclusive(facts: Facts, excess: Excess) -> str:
    miss = f"{excess.missed} of {excess.sent} requests miss {short(excess.objective)} ≤ {excess.bound_ms:g} ms"
    if not facts.joined:
        return f"{miss}; {what_is_seen(facts, excess) if facts.server is not None else NEEDS_SERVER_RECORDS}"
    ranked = excess.ranked()
    if not ranked:
        return f"{miss}, and no account is above {excess.baseline}: measure more requests first"
    name, share = ranked[0]
    unexplained = "no known cause explains it: look at its slowest requests first"
    return f"{miss}; {share:.0%} of the excess is {name}, and {unexplained}"


def _bottleneck(facts: Facts, state: State, findings: list[Finding]) -> str | None:
    """The first lifecycle of the costliest finding, None if that is the client; without one, of the largest excess."""
    if state in ("healthy", "invalid"):
        return None
    if findings:
        first = findings[0].lifecycles[0]
        return first if first in LIFECYCLES else None
    saved: dict[str, float] = defaultdict(float)
    for excess in excesses(facts):
        for name, _ in excess.ranked():
            saved[name.split(".")[0]] += excess.accounts[name] * excess.missed
    top = max(LIFECYCLES, key=lambda lifecycle: saved[lifecycle])
    return top if saved[top] > 0 else None


def _warnings(facts: Facts, closed: Closure) -> list[str]:
    warnings = load_notes(facts.meta)
    bound = tightest(facts, "ttft_ms") or tightest(facts, "e2e_ms")
    if 0 < facts.sent < FEWEST_REQUESTS:
        warnings.append(f"only {facts.sent} requests were measured; shares of fewer than {FEWEST_REQUESTS} mean little")
    if unsent := facts.errors.get(NO_END, 0):
        sentence = f"{unsent} of {facts.sent} requests were not sent, or nobody recorded their end"
        warnings.append(f"{sentence}: they count as not good, and say nothing of the server")
    if facts.served + unsent < facts.sent:
        errors = [f"{count} × {error}" for error, count in facts.errors.items() if error != NO_END]
        unserved = f"{facts.sent - facts.served - unsent} of {facts.sent} requests were not served"
        warnings.append(f"{unserved}: {', '.join(errors[:3])}")
    if unmeasured := int(facts.rows.tpot_unmeasured.sum()):
        warnings.append(
            f"the time per output token of {unmeasured} of {facts.served} served requests could not be measured (all "
            "their tokens came in one read): they are judged without it"
        )
    if bound and facts.lag_p90_ms is not None and facts.lag_p90_ms > CLIENT_LAG_WARNS * bound:
        warnings.append(
            f"the load generator sent late by {facts.lag_p90_ms:.1f} ms (p90): {facts.lag_p90_ms / bound:.0%} of the "
            f"objective of {bound:g} ms is its own delay"
        )
    if facts.server is not None:
        warnings += warnings_of(facts.server, facts.served)
    elif facts.served and not facts.joined:
        warnings.append(f"no server records: the accounts of {', '.join(LIFECYCLES)} cannot be seen, only client.lag")
        if facts.scraped:
            known = ", ".join(source.title for source in SOURCES)
            warnings.append(f"its /metrics is of none of the servers that are known here: {known}")
    elif facts.joined < facts.served:
        warnings.append(f"{facts.served - facts.joined} of {facts.served} served requests have no server record")
    if facts.joined and facts.steps is None:
        warnings.append("no step records: causes that show only in steps cannot be found")
    elif facts.steps is not None and facts.steps.model is None:
        warnings.append(f"only {facts.steps.count} steps: too few for a step model, so capacity is not estimated")
    warnings += filter(None, (steal_sentence(facts.steal), uncertainty_sentence(facts.meta)))
    if closed.closed < CLOSURE_WARNS * closed.joined:
        ledgers = f"only {closed.closed} of {closed.joined} ledgers close"
        warnings.append(f"{ledgers} within 1 % and 1 ms; shares are that uncertain")
    return warnings
