"""Requests wait for the checks of their input or output."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.symptom_tree.reading import account

MODERATION = "request.moderation"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    share = excess.share(MODERATION)
    waited_ms = share * excess.total_ms
    return Proposal(
        cause=f"checks of content hold late requests for {waited_ms:,.0f} ms",
        evidence=[
            evidence(f"{share:.0%} of the time above the objective is {MODERATION}", share, "share",
                     "requests: ttft_request_moderation_ns", weight=2),
            *excess_evidence(excess, (MODERATION,)),
        ],
        measurement="the same scenario with a tenant that no profile moderates",
        if_cause=f"{missing_share(excess)} falls, and {MODERATION} is 0",
        if_rival=f"{missing_share(excess)} stays",
        change="a faster classifier, fewer rules, or checks beside the prompt's computation",
        claims={MODERATION: 1.0},
        fixes=(Change(removed={MODERATION: 1.0}),),
    )  # fmt: skip


CAUSE = Cause(
    key="slow_moderation",
    lifecycles=("request",),
    object="checks of content",
    kind="fault",
    rival="a queue before the core",
    name="moderation",
    asks="Does the content check take long?",
    measurement="the same scenario without moderation",
    figures=(account("request.moderation"),),
    booked=("request.moderation",),
    complaints={"high_ttft": 17, "high_itl": 8, "devices_do_not_help": 6},
    reads={
        Records: Rule(read_records, accounts=(MODERATION,)),
        Accounts: hold_time(
            accounts=("request.moderation",),
            words="requests wait for the check against policies",
            change="a faster check, or one beside the generation",
            object="moderation",
            rival="long texts",
        ),
    },
)
