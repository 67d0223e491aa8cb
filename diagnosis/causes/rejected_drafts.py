"""Drafts are not accepted often enough: proposing and verifying them costs more than they save."""

from sojourn.diagnosis.capacity import FULL, best_load
from sojourn.diagnosis.cause import Cause, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.speculation import COSTS, RECORDS, drafts_of, load_without

DECODE = "compute.decode"
DRAFT = "compute.draft"
WAITS = ("request.queue", "memory.blocked")  # that longer steps make longer


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    drafts = drafts_of(facts)
    if drafts is None or drafts.lost_share < COSTS:
        return None
    share, lost = drafts.accepted / drafts.drafted, drafts.lost_share
    fixed = facts.engine.get("speculation_adaptive") == "off"
    settings = {"speculation_adaptive": "on"} if fixed else {"speculation": "none"}
    now = best_load(facts)
    tips = now >= FULL > load_without(facts, drafts, now)  # then nobody would wait
    return Proposal(
        cause=f"{share:.0%} of the drafts of speculation={facts.engine.get('speculation')} were accepted; drafts cost "
        f"{lost:.0%} of the decoding more than they saved",
        evidence=[
            evidence(f"{drafts.accepted:,.0f} of {drafts.drafted:,.0f} drafts were accepted", share, "share", RECORDS,
                     weight=2),
            evidence(f"{drafts.rejected_share:.0%} of the decoding went to rejected drafts, and proposing took "
                     f"{drafts.proposing_share:.0%} more", lost, "share", RECORDS, weight=6),
            *excess_evidence(excess, (DECODE, DRAFT, *WAITS)),
        ],
        measurement="the same scenario with fewer drafts, or none",
        settings=settings,
        if_cause=f"a token takes about {lost:.0%} less",
        if_rival=f"{missing_share(excess)} stays",
        claims={DRAFT: 1.0, DECODE: max(lost, drafts.rejected_share),
                **dict.fromkeys(WAITS, 1.0 if tips else min(1.0, lost))},
    )  # fmt: skip


CAUSE = Cause(
    key="rejected_drafts",
    lifecycles=("compute", "token"),
    object="speculation",
    kind="policy",
    rival="a model that is too large for its objective",
    rival_key="slow_decode",
    name="drafts of speculation",
    asks="Do drafts cost more than they save?",
    measurement="the same scenario with speculation=none",
    booked=("compute.decode", "compute.draft"),
    missing="drafted and accepted tokens of requests",
    complaints={"high_itl": 2},
    reads={Records: Rule(read_records, accounts=(DECODE, DRAFT, *WAITS))},
)
