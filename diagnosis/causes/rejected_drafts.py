"""Drafts are not accepted often enough: proposing and verifying them costs more than they save."""

from sojourn.diagnosis.capacity import FULL, best_load
from sojourn.diagnosis.cause import Cause, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH
from sojourn.diagnosis.statements import means
from sojourn.diagnosis.statements.accounts import GAIN_SOURCE
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.refutations import DRAFTS_THAT_PAY
from sojourn.diagnosis.statements.speculation import COSTS, RECORDS, drafts_of, load_without
from sojourn.interop.sources.pressure import RUNNING

DECODE = "compute.decode"
DRAFT = "compute.draft"
SELDOM, MANY_ROWS = 0.2, 16  # of the drafts; requests in a step, of which further rows are seldom free
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


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Few drafts are accepted, and a step that verifies them takes longer by more than they save."""
    view, drafts = facts.server, means.draft_counts(facts.server)
    part = means.queue_share(view, excess) if excess.objective == "ttft_ms" else 1.0
    if drafts is None or part < EXPLAINS_ENOUGH:
        return None
    running = view.gauges.get(RUNNING)
    if facts.batch_gain is not None:
        lost, is_known = drafts.lost_share(facts.batch_gain), True
    else:  # at most, where a step takes as long as it has rows
        lost, is_known = 1 - (1 + drafts.accepted) / (1 + drafts.depth), False
    seldom = drafts.share <= SELDOM and running is not None and running.mean >= MANY_ROWS
    if lost < COSTS or not (is_known or seldom):
        return None
    at_most = "" if is_known else "up to "
    return Proposal(
        cause=f"{drafts.share:.0%} of the drafts were accepted: a step verifies {drafts.depth:.1f} for each request "
        f"and gives {1 + drafts.accepted:.1f} tokens, which costs {at_most}{lost:.0%} of the time per token",
        evidence=[
            evidence(f"{drafts.share:.0%} of the drafts were accepted, {drafts.accepted:.2f} of {drafts.depth:.1f} in "
                     "a step of a request", drafts.share, "share", means.COUNTERS, weight=2),
            evidence(f"twice the requests in a batch give {facts.batch_gain:.1f} times the tokens: further rows of a "
                     f"step cost time, and those of drafts {lost:.0%} more than they save", lost, "share", GAIN_SOURCE,
                     weight=4)
            if is_known else
            evidence("what further rows cost a step is unknown: the batch has not varied", 0.0, "unknown",
                     GAIN_SOURCE, supports=False),
        ],
        measurement=f"one replica without {view.settings.get('speculation', 'speculation')}, at the same load",
        settings={},
        if_cause=f"a token takes {at_most}{lost:.0%} less",
        if_rival=f"a token takes as long or longer, and {missing_share(excess)} stays",
        change="no speculation at this load, or fewer drafts",
        explained=part * means.part_of_excess(excess, lost if is_known else lost / 2),
        gain=means.time_gained(view, f"{lost:.0%} of the time per token"),
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
    reads={
        Records: Rule(read_records, accounts=(DECODE, DRAFT, *WAITS)),
        Means: Rule(
            read_means,
            rival="a batch that is large for the device",
            rival_key="overload",
            refuted_by=(DRAFTS_THAT_PAY,),
        ),
    },
)
