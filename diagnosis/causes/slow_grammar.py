"""Requests wait until the grammar of their structured output is compiled, and not for a batch slot."""

from sojourn.diagnosis.cause import Cause, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH, WAITS
from sojourn.diagnosis.statements import means
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.refutations import FULL_POOL

QUEUE = ("request.queue",)
GRAMMAR = "grammar"
WORTH_NAMING = 0.2  # of the waiting
CHANGE = "few schemas that repeat, so that compiled ones are found again; a faster grammar back end; more host threads"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    waited = facts.waits.get(GRAMMAR, 0.0)
    if waited < WORTH_NAMING:
        return None
    return Proposal(
        cause=f"requests wait for the grammar of their structured output: {waited:.0%} of the waiting",
        evidence=[
            evidence(f"{waited:.0%} of the waiting was for a grammar", waited, "share", "requests: waits", weight=4),
            *excess_evidence(excess, QUEUE),
        ],
        measurement="the same scenario without structured output",
        if_cause="the queue empties",
        if_rival=f"{missing_share(excess)} stays",
        change=CHANGE,
        claims={QUEUE[0]: waited},
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Most of those that wait stand in the line for grammars, which the server shows apart."""
    view, share = facts.server, facts.server.courses.grammar_share or 0.0
    part = means.queue_share(view, excess)
    if share < means.MOSTLY or part < EXPLAINS_ENOUGH:
        return None
    return Proposal(
        cause=f"requests wait for the grammar of their structured output: {share:.0%} of those that wait",
        evidence=[
            evidence(f"{share:.0%} of the waiting requests stand in the line for grammars", share, "share",
                     means.GAUGES, weight=4),
            *means.queue_evidence(view, excess),
        ],
        measurement="the same load without response_format, or with one schema for all",
        settings={},
        if_cause=f"the line for grammars empties, and {missing_share(excess)} falls",
        if_rival=f"as many wait in the other line, and {missing_share(excess)} stays",
        change=CHANGE,
        explained=part * share,
        gain=means.time_gained(view, f"{part * share:.0%} of the time to first token"),
    )  # fmt: skip


CAUSE = Cause(
    key="slow_grammar",
    lifecycles=("request",),
    object="compilation of grammars",
    kind="fault",
    rival="a limit on the batch: any request would wait",
    rival_key="batch_cap",
    name="grammars of structured output",
    asks="Do requests wait for the grammar of their structured output?",
    measurement="the same scenario without structured output",
    booked=WAITS,
    missing="waits for the reason grammar (requests: waits)",
    complaints={"high_ttft": 20},
    reads={
        Records: Rule(read_records, accounts=QUEUE, reason=GRAMMAR),
        Means: Rule(read_means, refuted_by=(FULL_POOL,)),
    },
)
