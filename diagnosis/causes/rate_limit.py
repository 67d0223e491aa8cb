"""The limit of a tenant refuses its requests, or holds them until there is room."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Client, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.excess import SERVED
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.client_only import explain_refusal
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.refusals import BY_LIMIT, REFUSED
from sojourn.diagnosis.symptom_tree.reading import account

QUOTA = "request.quota"


def read_records(facts: Records, excess: Excess | None) -> Proposal | None:
    if excess is None:
        return None
    refused = excess.objective == SERVED
    if refused and not (excess.error.startswith(REFUSED) and BY_LIMIT in excess.error):
        return None
    if not refused and excess.share(QUOTA) < 0.1:
        return None
    tenants = ", ".join(sorted({str(name) for name in facts.rows.loc[excess.missing].tenant.dropna()} - {""})[:3])
    whose = f"the limit of tenant {tenants}" if tenants else "the limit of the tenant"
    held_ms = excess.accounts.get(QUOTA, 0.0)
    return Proposal(
        object=whose,
        cause=f"{whose} {'refuses' if refused else 'holds'} {excess.missed} of {excess.sent} requests",
        evidence=[
            evidence(f"{excess.missed} requests ended with “{excess.error}”", excess.missed, "requests",
                     "client: error", weight=3) if refused
            else evidence(f"late requests were held for {held_ms:,.0f} ms until the limit had room", held_ms, "ms",
                          "requests: ledger_request_quota_ns", weight=3),
            *excess_evidence(excess, (QUOTA,)),
        ],
        measurement="the same scenario with a larger limit for this tenant",
        if_cause="its requests are served at once",
        if_rival="its requests wait for a place instead",
        change=f"raise {whose} in the file of `access`, or send less",
        claims={QUOTA: 1.0},
        explained=1.0 if refused else None,
        fixes=() if refused else (Change(removed={QUOTA: 1.0}),),
        in_replay=not refused,
    )  # fmt: skip


def read_loss(facts: Client, loss: Excess) -> Proposal | None:
    """Requests are refused because a tenant has reached its limit."""
    return explain_refusal(facts, loss, by_limit=True)


CAUSE = Cause(
    key="rate_limit",
    lifecycles=("request",),
    object="limit of a tenant",
    kind="policy",
    rival="a queue that is full",
    rival_key="queue_limit",
    name="rate limit of a tenant",
    asks="Does a tenant's limit hold requests?",
    measurement="the same scenario without the tenant's limits",
    figures=(account("request.quota"),),
    booked=("request.quota",),
    complaints={"high_ttft": 11, "low_device_utilisation": 5, "product_latency_poor": 5},
    reads={
        Records: Rule(read_records, needs=()),
        Accounts: hold_time(
            accounts=("request.quota",),
            words="requests wait until the tenant's limits have room",
            change="higher limits for the tenant",
            object="limits of a tenant",
            rival="overload",
            rival_key="",
        ),
    },
    lost=Rule(read_loss, needs=("loss",), rival_key=""),
)
