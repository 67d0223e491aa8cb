"""One tenant sends so much that the requests of the others wait for it."""

from sojourn.diagnosis.cause import Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import CONTENTION
from sojourn.diagnosis.statements.blame import blamed_on
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.scheduling import MOSTLY, policy
from sojourn.diagnosis.symptom_tree.reading import Reading


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    if facts.engine.get("policy") == "fair-share" or facts.rows.tenant.nunique() < 2:
        return None
    found = [each for each in blamed_on(facts, excess, "tenant") if each.share >= MOSTLY]
    if not found or not found[0].of_others:
        return None
    blamed = found[0]
    fair = 1 / facts.rows.tenant.nunique()
    work = _share_of_tokens(facts, blamed.name)
    return Proposal(
        object=f"share of tenant {blamed.name}",
        cause=f"tenant {blamed.name} takes {work:.0%} of the tokens, and the others wait for it",
        evidence=[
            *excess_evidence(excess, CONTENTION),
            evidence(f"{blamed.share:.0%} of the waiting of late requests, most of them of other tenants, was for "
                     f"{blamed.who}", blamed.share, "share", "steps: request_ids, refusals; requests: ledger_*_ns",
                     weight=2),
            evidence(f"it sends {work:.0%} of the tokens; an equal share would be {fair:.0%}", work, "share",
                     "requests: tenant, prompt_tokens, output_tokens", supports=work > 1.25 * fair, weight=2),
        ],
        measurement="the same scenario with a fair share for each tenant",
        settings=policy("fair-share", facts),
        if_cause=f"the other tenants' requests are served in time, and those of {blamed.name} wait",
        if_rival=f"{missing_share(excess)} stays for every tenant",
        change=f"policy=fair-share, or a limit of requests for tenant {blamed.name}",
        claims=dict.fromkeys(CONTENTION, blamed.share),
        fixes=(Change(settings=policy("fair-share", facts)),),
        rival_fix=Change(device_speed=2.0),
        request_ids=blamed.request_ids,
    )  # fmt: skip


def _share_of_tokens(facts: Client, tenant: str) -> float:
    tokens = facts.rows[["server_prompt_tokens", "output_tokens"]].astype("float64").fillna(0).sum(axis=1)
    return float(tokens[facts.rows.tenant == tenant].sum() / max(tokens.sum(), 1.0))


def show_tenants(facts: Client) -> Reading | None:
    if "tenant" not in facts.rows or not len(facts.rows):
        return None
    counts = facts.rows.tenant.fillna("").value_counts()
    share = float(counts.iloc[0] / len(facts.rows))
    if len(counts) == 1:
        return Reading("all requests are of one tenant", True, "client: tenant")
    return Reading(
        f"the largest of {len(counts)} tenants sends {share:.0%} of the requests", False, "client: tenant", share
    )


CAUSE = Cause(
    key="tenant_share",
    lifecycles=("request",),
    object="share of a tenant",
    kind="policy",
    rival="overload by all tenants together",
    rival_key="overload",
    asks="Does one tenant take the server?",
    measurement="the same scenario with policy=fair-share",
    figures=(show_tenants,),
    booked=CONTENTION,
    complaints={"high_ttft": 10, "product_latency_poor": 4},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
