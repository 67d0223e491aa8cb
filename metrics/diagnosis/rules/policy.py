"""Causes in the lifecycle of a request: an admission policy that holds requests back though there is room."""

import math

from metrics.diagnosis.capacity import FULL, best_load, load
from metrics.diagnosis.evidence import Facts
from metrics.diagnosis.excess import Excess
from metrics.diagnosis.rules.blamed import blamed_group
from metrics.diagnosis.rules.candidate import (
    EXPLAINS_ENOUGH,
    Candidate,
    basis,
    evidence,
    excess_evidence,
    gain,
    missing_share,
    rerun,
)
from metrics.diagnosis.rules.request import QUEUE
from metrics.diagnosis.verdict import Fix, Probe

# What a policy that the engine offers does, and why it holds requests back.
HOLDS_BACK = {
    "static": "static batching admits nobody before the last request of its batch has ended",
}


def admission_policy(facts: Facts, excess: Excess | None) -> Candidate | None:
    """Requests wait because the policy says so, not because a place, tokens or blocks are short."""
    steps = facts.steps
    held = facts.waits.get("policy", 0.0)
    if steps is None or excess is None or held * excess.share(*QUEUE) < EXPLAINS_ENOUGH:
        return None
    if not math.isnan(best_load(facts)) and best_load(facts) >= FULL:  # admitting more would only move the queue
        return None
    policy, limit = str(facts.engine.get("policy") or "fcfs"), facts.engine.get("max_long_prefills")
    if policy not in HOLDS_BACK and not limit:
        return None
    by_limit = policy not in HOLDS_BACK
    change = {"max_long_prefills": 2 * int(limit)} if by_limit else {"policy": "fcfs"}
    cause = f"at most {limit} long prompts are computed at a time" if by_limit else HOLDS_BACK[policy]
    cap = facts.engine.get("max_num_seqs")
    room = f", while {steps.mean_batch:.1f} of {cap} places were taken" if cap else ""
    gained = gain(facts, QUEUE)
    setting = ", ".join(f"{name}={value}" for name, value in change.items())
    return Candidate(
        gain=gained,
        key="admission_policy",
        lifecycles=["request"],
        object="limit of long prompts (max_long_prefills)" if by_limit else "admission policy",
        cause=f"{cause}{room}",
        kind="policy",
        evidence=[
            *excess_evidence(excess, QUEUE),
            evidence(f"{held:.0%} of the waiting was for the policy: neither a place, nor tokens, nor KV blocks were "
                     "short", held, "share", "requests: waits; steps: refusals"),
            evidence(f"load / capacity is {load(facts):.2f}", load(facts), "ratio",
                     "steps: fit of wall time; client: due_ns", supports=load(facts) < FULL),
            *blamed_group(facts, excess),
        ],
        probe=Probe(
            measurement=f"the same scenario with {setting}",
            command=rerun(facts, **change),
            rival="overload: the device is full, whoever is admitted",
            if_cause=f"waiting for the policy falls from {held:.0%} to none, {gained}",
            if_rival=f"{missing_share(excess)} stays, and the waiting is for places or tokens instead",
        ),
        fix=Fix(change=setting, gain=str(gained), basis=basis(QUEUE)),
    )  # fmt: skip
