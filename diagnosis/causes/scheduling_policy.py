"""The order in which requests are served makes some of them late that another order would serve in time."""

from sojourn.diagnosis.cause import Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import steps_of
from sojourn.diagnosis.proposal import CONTENTION
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.scheduling import ORDERS, OVERTAKEN, overtaken_share, policy
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading

INTERFERENCE = "request.interference"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    name = str(facts.engine.get("policy") or "fcfs")
    if name not in ORDERS:
        return None
    overtaken, starved = overtaken_share(facts, excess), facts.steps.starved_share
    if name == "prefill-first":
        size, claims = starved, {INTERFERENCE: 1.0}
        fact = evidence(f"in {starved:.0%} of the steps' time requests that decode are left out for others' prompts",
                        starved, "share", "steps: request_ids, kinds", supports=starved >= 0.1, weight=2)  # fmt: skip
    else:
        size = _in_order_share(overtaken)
        claims = dict.fromkeys(CONTENTION, size)
        fact = evidence(f"{overtaken:.1f} requests that came later got a place before a late one, on average",
                        overtaken, "requests", "requests: arrived_ns, scheduled_ns",
                        supports=overtaken >= OVERTAKEN, weight=2)  # fmt: skip
    if size < 0.05 or sum(excess.share(each) * part for each, part in claims.items()) < 0.1:
        return None
    others = [each for each in ("fcfs", "shortest-prefill-first", "fair-share") if each != name]
    return Proposal(
        cause=f"policy {name}: {ORDERS[name]}",
        evidence=[*excess_evidence(excess, tuple(claims)), fact],
        measurement="the same scenario in order of arrival",
        settings=policy("fcfs", facts),
        if_cause=f"the requests that are late now are served in time, and {missing_share(excess)} falls",
        if_rival=f"others are late instead, and {missing_share(excess)} stays",
        claims=claims,
        fixes=tuple(Change(settings=policy(each, facts)) for each in others),
        rival_fix=Change(device_speed=2.0),
    )


def _in_order_share(overtaken: float) -> float:
    """The part of the waiting that the order explains: of k overtaking requests and one's own turn, k are its doing."""
    return overtaken / (1.0 + overtaken)


def show_order(facts: Client) -> Reading | None:
    policy = facts.engine.get("policy")
    if policy is None:
        return None
    steps = steps_of(facts)
    starved = 0.0 if steps is None else steps.starved_share
    return Reading(
        f"the order is {policy}; answers stood still for prompts in {starved:.0%} of the time of steps",
        policy == "fcfs" and starved < NEGLIGIBLE,
        "run.json: policy; steps: kinds, request_ids",
        starved,
    )


CAUSE = Cause(
    key="scheduling_policy",
    lifecycles=("request",),
    object="scheduling policy",
    kind="policy",
    rival="overload: in any order somebody is late",
    rival_key="overload",
    name="scheduling order",
    asks="Are some requests served before others?",
    measurement="the same scenario with policy=fcfs",
    figures=(show_order,),
    booked=CONTENTION,
    complaints={"high_ttft": 8, "high_itl": 2},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
