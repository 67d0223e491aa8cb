"""Requests wait because the policy says so, not because a place, tokens or blocks are short."""

from sojourn.diagnosis.capacity import FULL, best_load, load
from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import QUEUE, WAITS
from sojourn.diagnosis.statements.accounts import propose, waited_for
from sojourn.diagnosis.statements.excess import excess_evidence, load_evidence, missing_share
from sojourn.diagnosis.statements.scheduling import MOSTLY, policy
from sojourn.diagnosis.symptom_tree.reading import Reading, waiting_for
from sojourn.metrics.prediction import settings_text

# What a policy that the engine offers does, and why it holds requests back.
HOLDS_BACK = {"static": "static batching admits nobody before the last request of its batch has ended"}


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    waited, batch = facts.waits.get("policy", 0.0), facts.steps.mean_batch if facts.steps is not None else None
    name, limit = str(facts.engine.get("policy") or "fcfs"), facts.engine.get("max_long_prefills")
    by_limit = name not in HOLDS_BACK
    if by_limit and not limit:
        return None
    why = f"at most {limit} long prompts are computed at a time" if by_limit else HOLDS_BACK[name]
    cap, best = facts.engine.get("max_num_seqs"), best_load(facts)
    room = f", while {batch:.1f} of {cap} places were taken" if cap and batch is not None else ""
    settings = {"max_long_prefills": 2 * int(limit)} if by_limit else policy("fcfs", facts)
    fixes = [settings]
    if by_limit:
        fixes += [{"max_long_prefills": None, "long_prefill_tokens": None}, {"max_long_prefills": 4 * int(limit)}]
    return Proposal(
        object="limit of long prompts (max_long_prefills)" if by_limit else "admission policy",
        cause=f"{why}{room}",
        evidence=[
            *excess_evidence(excess, QUEUE),
            evidence(f"{waited:.0%} of the waiting was for the policy: neither a place, nor tokens, nor KV blocks were "
                     "short", waited, "share", "requests: waits; steps: refusals", supports=waited >= MOSTLY, weight=2),
            *([load_evidence(f"load / capacity is {load(facts):.2f}, and {best:.2f} at the best batch", best,
                             supports=best < FULL)] if best == best else []),
        ],
        measurement=f"the same scenario with {settings_text(settings)}",
        settings=settings,
        if_cause=f"waiting for the policy falls from {waited:.0%} to none",
        if_rival=f"{missing_share(excess)} stays, and the waiting is for places or tokens instead",
        fixes=tuple(Change(settings=each) for each in fixes),
        rival_fix=Change(device_speed=2.0),
    )  # fmt: skip


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """The policy lets requests wait."""
    found = [*excess_evidence(excess, QUEUE), *waited_for(facts, "policy")]
    return propose(excess, "the admission policy lets requests wait", found, "policy=fcfs")


def show_long_prefill_limit(facts: Records) -> Reading | None:
    found = waiting_for("policy", "the policy to admit them")(facts)
    policy = facts.engine.get("policy")
    return (
        found
        if found is None or policy is None
        else Reading(f"{found.statement} (policy {policy})", found.rules_out, found.source, found.share)
    )


CAUSE = Cause(
    key="admission_policy",
    lifecycles=("request",),
    object="admission policy",
    kind="policy",
    rival="overload: the device is full, whichever request is admitted",
    rival_key="overload",
    asks="Does the policy hold requests back?",
    measurement="the same scenario with policy=fcfs",
    figures=(show_long_prefill_limit,),
    booked=WAITS,
    complaints={"high_ttft": 7, "low_device_utilisation": 2, "devices_do_not_help": 2},
    reads={
        Records: Rule(read_records, accounts=QUEUE, reason="policy"),
        Accounts: Rule(read_accounts, accounts=QUEUE, reason="policy", rival="overload"),
    },
)
