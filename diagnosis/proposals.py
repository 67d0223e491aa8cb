"""What all causes propose: each is asked with the kinds of evidence that a run has, those that know most first."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from sojourn.diagnosis.capacity import load
from sojourn.diagnosis.cause import Cause, Need, Rule
from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.evidence import Accounts, Client, Means, as_kind, is_joined, steps_of, view_of
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.proposal import ADMISSION, CONTRADICTION, WORTH_A_LOOK, Proposal, gain
from sojourn.diagnosis.repeat import rerun, with_records, with_settings
from sojourn.diagnosis.server_means import shows_ledger
from sojourn.diagnosis.verdict import evidence
from sojourn.metrics.prediction import settings_text

ALMOST = 0.9  # of what was served: an estimate of capacity is good to about a tenth
IS_KNOWN: dict[Need, Callable[[Client, Excess | None], bool]] = {
    "excess": lambda facts, excess: excess is not None and excess.objective != SERVED,
    "loss": lambda facts, excess: excess is not None and excess.objective == SERVED,
    "steps": lambda facts, excess: facts.steps is not None,
    "step model": lambda facts, excess: facts.steps is not None and facts.steps.model is not None,
    "work": lambda facts, excess: facts.work is not None,
    "load": lambda facts, excess: not math.isnan(load(facts)),
}


def proposals(facts: Client, excess: Excess) -> list[Proposal]:
    """What every cause that applies says of one excess. Of two rules of one cause that which knows more speaks."""
    found: dict[str, Proposal] = {}
    for cause, rule, part in rules_for(facts):
        if cause.key not in found and (proposal := explain(cause, rule, part, excess)) is not None:
            found[cause.key] = proposal
    return list(found.values())


def proposals_of_symptom(facts: Client, symptom: str) -> list[Proposal]:
    """What could be the cause of a symptom that shows without an objective being missed."""
    tried = [each for each in rules_for(facts) if each[1].symptom == symptom]
    return [found for each in tried if (found := explain(*each, None)) is not None]


def rules_for(facts: Client) -> list[tuple[Cause, Rule, Client]]:
    """The rules that the evidence of this run can answer, and the part of it that each reads."""
    of_servers = is_joined(facts) and any(steps_of(read()) is not None for read in facts.servers.values())
    parts = parts_of(facts, of_servers)
    known = [(cause, cause.reads[type(part)], part) for part in parts
             for cause in CAUSES.values() if type(part) in cause.reads]  # fmt: skip
    # A lost request has no record of the server's: its error is all there is. What it follows from is in the means, too
    lost = [cause for cause in CAUSES.values() if cause.lost is not None]
    known += [(cause, cause.lost, facts) for cause in lost if type(parts[0]) is not Means or cause.follows_from]
    return [each for each in known if not of_servers or _is_of_whole(*each[:2])]


def parts_of(facts: Client, of_servers: bool = False) -> list[Client]:
    """The kinds of evidence in a run, those that know most first. `of_servers`: its servers know the steps that it
    does not."""
    if is_joined(facts):
        return [facts] if steps_of(facts) is not None or of_servers else [facts, as_kind(Accounts, facts)]
    if view_of(facts) is None:
        return [as_kind(Client, facts)]
    means = as_kind(Means, facts)
    return [as_kind(Accounts, facts), means] if shows_ledger(facts) else [means]


def _is_of_whole(cause: Cause, rule: Rule) -> bool:
    """Whether a fleet shows it that no server alone does: its router, its clients, and lost requests."""
    return cause.of_fleet or (rule.lifecycles or cause.lifecycles)[0] == "client" or "loss" in rule.needs


def explain(cause: Cause, rule: Rule, facts: Client, excess: Excess | None) -> Proposal | None:
    """What a rule says of an excess, with what its cause says of every one; None where it does not apply."""
    found = rule.explain(facts, excess) if _applies(rule, facts, excess) else None
    if found is None or contradiction(rule, facts):
        return None
    claims = _claims(rule, facts) if found.claims is None else found.claims
    if not cause.in_front and ADMISSION in claims and excess is not None:
        claims = {**claims, ADMISSION: claims[ADMISSION] * (1 - _front_share(facts, excess))}
    found = _hold_against_the_served(facts, found)
    measurement, command = _measurement(facts, found)
    return replace(
        found,
        key=cause.key,
        claims=claims,
        rival=rule.rival or cause.rival,
        rival_key=found.rival_key or (cause.rival_key if rule.rival_key is None else rule.rival_key),
        lifecycles=found.lifecycles or rule.lifecycles or cause.lifecycles,
        object=found.object or rule.object or cause.object,
        kind=found.kind or rule.kind or cause.kind,
        change=found.change or settings_text(found.settings or {}),
        measurement=measurement,
        command=command,
        gain=found.gain or gain(facts, claims),
    )


def contradiction(rule: Rule, facts: Client) -> str:
    """What the page shows that the cause of a rule would not; "" where nothing does."""
    return next(filter(None, (each.contradicts(facts) for each in rule.refuted_by)), "")


def is_refuted(facts: Client, key: str) -> bool:
    """Whether the page of this moment refutes a cause that an earlier one showed."""
    return any(contradiction(rule, part) for cause, rule, part in rules_for(facts) if cause.key == key)


def ruled_out(facts: Client, lost: Sequence[Excess]) -> list[str]:
    """The causes that a rule proposed and that something else on the page refutes, each with what it is."""
    found = {
        cause.key: f"{rule.object or cause.object}: {why}"
        for excess in lost
        for cause, rule, part in rules_for(facts)
        if (why := contradiction(rule, part)) and _applies(rule, part, excess) and rule.explain(part, excess)
    }
    return [found[name] for name in sorted(found)]


def _measurement(facts: Client, found: Proposal) -> tuple[str, str]:
    """In words, and as a command, "" where none makes it."""
    if found.needs_records:
        return with_records(facts)
    if found.rate_rps is not None:
        return found.measurement, rerun(facts, rate_rps=found.rate_rps)
    return (
        (found.measurement, "") if found.settings is None else with_settings(facts, found.measurement, found.settings)
    )


def can_be_asked(rule: Rule, facts: Client) -> bool:
    """Whether the evidence has what the rule needs, whatever is lost."""
    return all(IS_KNOWN[need](facts, None) for need in rule.needs if need not in ("excess", "loss"))


def _applies(rule: Rule, facts: Client, excess: Excess | None) -> bool:
    if not all(IS_KNOWN[need](facts, excess) for need in rule.needs):
        return False
    if excess is None or not rule.accounts or IS_KNOWN["loss"](facts, excess):
        return True
    return sum(excess.share(name) * part for name, part in _claims(rule, facts).items()) >= WORTH_A_LOOK


def _claims(rule: Rule, facts: Client) -> dict[str, float]:
    """By default all of the accounts of the rule, and with a reason the part of the waiting that has it."""
    return dict.fromkeys(rule.accounts, facts.waits.get(rule.reason, 0.0) if rule.reason else 1.0)


def _front_share(facts: Client, excess: Excess) -> float:
    """Of what late requests waited before the core took them in, 0 to 1: for turns of the front's event loop."""
    if "front_turns_ns" not in facts.rows:
        return 0.0
    late = facts.rows.loc[excess.missing]
    waited = float(late.ledger_request_admission_ns.astype("float64").sum())
    return min(1.0, float(late.front_turns_ns.sum()) / waited) if waited > 0 else 0.0


def _hold_against_the_served(facts: Client, found: Proposal) -> Proposal:
    """A verdict of capacity is doubted where more than that was served."""
    served = facts.served_rps
    if found.capacity_rps is None or served is None or found.capacity_rps >= ALMOST * served:
        return found
    doubt = evidence(
        f"{served:.1f} requests/s were served while others waited, more than the {found.capacity_rps:.1f} that this "
        "cause allows", served / found.capacity_rps, "ratio", "client: last_byte_ns", supports=False,
        weight=CONTRADICTION,
    )  # fmt: skip
    return replace(found, evidence=[*found.evidence, doubt])
