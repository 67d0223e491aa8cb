"""Findings: what was judged of each cause, as a diagnosis shows it."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pandas as pd

from sojourn.diagnosis.adjudicate import Judged, Judgement
from sojourn.diagnosis.confidence import confidence, features
from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.proposal import Proposal, gain
from sojourn.diagnosis.proposals import proposals_of_symptom
from sojourn.diagnosis.regained import tell_replay
from sojourn.diagnosis.repeat import with_settings
from sojourn.diagnosis.symptoms import BY_KEY, Symptom, cohort, symptom_of
from sojourn.diagnosis.verdict import LOST_TITLE, SEPARATOR, Finding, Fix, Probe, support_of
from sojourn.metrics.prediction import Change, attainment_text, change_text, settings_text
from sojourn.metrics.request.objectives import short

MOST_REQUESTS = 50  # that a finding links to
DEFAULT = Change()


def findings(facts: Client, judgement: Judgement) -> list[Finding]:
    """The causes, most important first, then the alternatives."""
    by_key = {each.suspect.key: each for each in (*judgement.causes, *judgement.alternatives)}
    return [_finding(facts, each, judgement, by_key) for each in (*judgement.causes, *judgement.alternatives)]


def finding_of_symptom(facts: Client, symptom: Symptom) -> Finding | None:
    """The cause of a symptom that costs no request; None where none is known."""
    found = proposals_of_symptom(facts, symptom.key)
    best = max(found, key=lambda each: support_of(each.evidence), default=None)
    if best is None:
        return None
    return Finding(symptom=symptom.key, title=symptom.title, objective="", cohort="all requests", goodput_lost=None,
                   change=best.fixes[0] if best.fixes else None, confidence=support_of(best.evidence),
                   **best.verdict())  # fmt: skip


def _finding(facts: Client, each: Judged, judgement: Judgement, by_key: dict[str, Judged]) -> Finding:
    excess, proposal = each.suspect.main
    late = [case[0] for case in sorted(each.suspect.cases, key=lambda case: -case[0].missed)]
    lost = sorted(set().union(*(case.missing for case in late)))  # a request counts once
    found, rival = features(facts, each, judgement), by_key.get(proposal.rival_key)
    explains_ms = each.explains_ms.get(excess.name, 0.0)
    titles = dict.fromkeys(_title(facts, case) for case in late)
    verdict = proposal.verdict()
    verdict |= {"fix": _fix(facts, proposal, each, judgement), "probe": _probe(facts, verdict["probe"], each)}
    return Finding(
        symptom=symptom_of(facts, excess),
        title=SEPARATOR.join(titles),
        objective=_objective(excess),
        cohort=cohort(facts, excess),
        goodput_lost=len(lost) / facts.sent or None,
        role=each.role,
        follows=sorted(each.suspect.follows),
        confidence=confidence(found),
        confidence_features=found,
        explains_ms=float(explains_ms),
        explains_share=float(explains_ms / excess.total_ms if excess.total_ms else proposal.explained or 0.0),
        change=each.change,
        prediction=each.prediction,
        goodput_gain=None if each.gain is None else float(each.gain),
        gain_is_estimate=each.is_estimate,
        rival_prediction=judgement.rivals.get(proposal.key) if rival is None else rival.prediction,
        request_ids=list(proposal.request_ids) or _worst(facts.rows.loc[lost], excess),
        **verdict,
    )


def _title(facts: Client, excess: Excess) -> str:
    return LOST_TITLE if excess.objective == SERVED else BY_KEY[symptom_of(facts, excess)].title


def _objective(excess: Excess) -> str:
    if excess.objective == SERVED:
        return f"served: “{excess.error}”" + (f" for {excess.klass}" if excess.klass else "")
    return f"{short(excess.objective)} ≤ {excess.bound_ms:g} ms" + (f" for {excess.klass}" if excess.klass else "")


def _worst(rows: pd.DataFrame, excess: Excess) -> list[str]:
    if excess.objective != SERVED:
        rows = rows.sort_values(excess.objective, ascending=False)
    return [str(name) for name in rows.request_id.head(MOST_REQUESTS)]


def _probe(facts: Client, probe: Probe, each: Judged) -> Probe:
    """The measurement of the fix that the replays chose, where it is another than the first one."""
    settings = _other_settings(each)
    if settings is None or not probe.command:
        return probe
    measurement, command = with_settings(facts, f"the same scenario with {settings_text(settings)}", settings)
    return msgspec.structs.replace(
        probe,
        measurement=measurement,
        command=command,
        if_cause=tell_replay(facts, each.prediction, None)[0],
    )


def _other_settings(each: Judged) -> Mapping[str, Any] | None:
    """The settings of the best fix; None where that is the first one, or changes no setting."""
    first = each.suspect.proposal.fixes[:1]
    is_other = each.change is not None and each.prediction is not None and each.change not in first
    return each.change.settings if is_other and each.change.settings else None


def _fix(facts: Client, proposal: Proposal, each: Judged, judgement: Judgement) -> Fix:
    """The change in words and what it gains: by replay where there was one."""
    settings = _other_settings(each)
    change = proposal.change if settings is None else settings_text(settings)
    if each.prediction is None:
        estimate = proposal.gain or gain(facts, proposal.claims or {})
        return Fix(change=change, gain=estimate.statement, basis=estimate.basis, regains=estimate.regains)
    gained, is_some = tell_replay(facts, each.prediction, judgement.unchanged if proposal.in_replay else None)
    if not proposal.in_replay:
        basis = "this run replayed: a replay does not have this cause"
        return Fix(change=change, gain=gained, basis=basis, regains=is_some)
    routes = each.change is not None and (each.change.routing, each.change.servers) != (
        DEFAULT.routing,
        DEFAULT.servers,
    )
    replayed = change_text(each.change) if routes else "the change"  # the router's own policies have other names
    return Fix(
        change=change,
        gain=gained,
        basis=f"this run replayed with {replayed}; replayed unchanged it has {attainment_text(judgement.unchanged)}",
        regains=is_some,
    )
