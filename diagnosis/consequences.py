"""Losses that follow from something else: a full queue from what fills it, a client that gives up from what is slow.

Such a loss has a near cause at most (the bound of the queue) and a root (the batch cap, the pool, the device). The
roots are found by asking every cause about the time that the loss follows from, as if that were an excess of its own.
`adjudicate` then puts a root before the near cause.
"""

from collections.abc import Sequence
from dataclasses import replace

from sojourn.diagnosis.causes import CAUSES
from sojourn.diagnosis.evidence import Client
from sojourn.diagnosis.excess import EMPTY, FEWEST_GOOD, SERVED, Excess, accounts_of
from sojourn.diagnosis.proposal import WAITS, WORTH_A_LOOK, Gain, Proposal
from sojourn.diagnosis.proposals import proposals
from sojourn.diagnosis.server_means import mean_excess
from sojourn.diagnosis.statements.excess import missing_share
from sojourn.diagnosis.statements.refusals import full_share, is_always_full
from sojourn.diagnosis.statements.transit import is_timeout
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.ledger import ACCOUNT_BY_NAME


def near_keys(facts: Client, loss: Excess, proposed: Sequence[Proposal]) -> set[str]:
    """The proposed causes of a loss that are consequences themselves."""
    follows = {each.key for each in proposed if CAUSES[each.key].follows_from}
    return follows if loss.objective == SERVED and follows and is_always_full(facts, loss) else set()


def roots(facts: Client, loss: Excess, proposed: Sequence[Proposal]) -> list[Proposal]:
    """What causes the time that a loss follows from, as proposals for the loss; [] where it follows from none."""
    near = near_keys(facts, loss, proposed)
    if near:
        accounts = {name for key in near for name in CAUSES[key].follows_from}
    elif loss.objective == SERVED and is_timeout(loss.error):
        accounts = set(ACCOUNT_BY_NAME)
    else:
        return []
    behind = _time_behind(facts, loss, accounts, is_queue=bool(near))
    if behind is None:
        return []
    known = {each.key for each in proposed}
    found = [each for each in proposals(facts, behind) if each.key not in known]
    return [of_loss for each in found if (of_loss := _of_loss(facts, loss, behind, each, is_queue=bool(near)))]


def _time_behind(facts: Client, loss: Excess, accounts: set[str], *, is_queue: bool) -> Excess | None:
    """The time of served requests that a loss follows from: what they waited for, or for a client that gave up all."""
    objective = "ttft_ms" if is_queue else "e2e_ms"
    served = facts.rows[(facts.rows.status == "ok") & facts.rows[objective].notna()]
    alike = served[served.klass == loss.klass]
    rows = alike if len(alike) >= FEWEST_GOOD else served
    if len(rows) < FEWEST_GOOD:
        return None
    means = accounts_of(rows, objective).mean()
    behind = Excess(
        objective=objective, klass=str(rows.klass.mode()[0]), bound_ms=0.0, missed=len(rows), sent=len(rows),
        mean_ms=float(rows[objective].mean()), baseline=EMPTY, missing=rows.index,
        accounts={name: float(ms) for name, ms in means.items() if ms == ms},
    )  # fmt: skip
    behind = mean_excess(facts, behind)
    return replace(behind, accounts={name: ms for name, ms in behind.accounts.items() if name in accounts})


def _of_loss(facts: Client, loss: Excess, behind: Excess, found: Proposal, *, is_queue: bool) -> Proposal | None:
    """The cause of that time as a cause of the loss; None where it explains next to none of it."""
    cause, share = CAUSES[found.key], found.explained
    if behind.total_ms and share is None:
        share = sum(behind.share(name) * part for name, part in (found.claims or {}).items())
    elif is_queue and not {*cause.booked} & {*WAITS}:  # no account tells, and the time of this cause is no waiting
        return None
    share = 1.0 if share is None else share
    if share < WORTH_A_LOOK or cause.follows_from:
        return None
    lost = Gain(f"at most the {loss.missed:,} requests that are lost now", basis="what they follow from is gone")
    before, after = missing_share(behind), missing_share(loss)
    return replace(
        found, explained=min(1.0, share), gain=lost, evidence=[*found.evidence, _link(facts, loss, is_queue=is_queue)],
        if_cause=found.if_cause.replace(before, after), if_rival=found.if_rival.replace(before, after),
    )  # fmt: skip


def _link(facts: Client, loss: Excess, *, is_queue: bool) -> Evidence:
    count = f"{loss.missed} of {loss.sent} requests{f' of {loss.klass}' if loss.klass else ''}"
    if is_queue:
        share = full_share(facts, loss)
        return evidence(f"the queue is full of requests that wait for this: {count} are refused, in {share:.0%} of the "
                        "time", share, "share", "client: due_ns, error")  # fmt: skip
    return evidence(f"clients gave up {count} before their end (“{loss.error}”): served ones spend their time here",
                    loss.missed, "requests", "client: status, error")  # fmt: skip
