"""Prompts have much in common, behind something that differs in each: a prefix cache finds nothing of it."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.evidence import is_joined
from sojourn.diagnosis.memory_facts import prompt_order
from sojourn.diagnosis.proposal import WAITS
from sojourn.diagnosis.statements.accounts import lose_prompts
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.prefixes import OUTCOMES, PROMPT_ACCOUNTS, WORTH_SHARING, claims_of_hits, saved_share
from sojourn.diagnosis.symptom_tree.reading import KNOWN_OUTCOMES, NEGLIGIBLE, PREFILL_TIME, Reading, prefix_outcome


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    kv = facts.kv()
    order = None if kv is None else kv.order
    if order is None or kv.use is None or order.movable_share < WORTH_SHARING:
        return None
    diverged = kv.use.outcomes.get("miss_diverged", 0.0)
    early = order.diverged_p50_tokens
    return Proposal(
        cause=f"{order.movable_share:.0%} of the prompt tokens stood in earlier prompts behind a part that differs: "
        "the changing part stands before the shared one",
        evidence=[
            evidence(f"{order.movable_share:.0%} of the prompt tokens could be found if they stood first, in "
                     f"{order.movable_requests:.0%} of the requests", order.movable_share, "share",
                     "requests: movable_tokens, repeated_tokens", weight=3),
            *([evidence(f"prompts leave the known ones at token {early:,.0f} (median)", early, "tokens",
                        "requests: prefix_shared_tokens", supports=order.is_early)] if early is not None else []),
            evidence(f"{diverged:.0%} of the prompt tokens differ from all that followed the same beginning "
                     "(recorded as `miss_diverged`)", diverged, "share", OUTCOMES, supports=diverged >= WORTH_SHARING),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
        ],
        measurement="`sojourn lint` of this run: it names the parts and what the other order would save",
        if_cause=f"with the shared part first, cached tokens rise by about {order.movable_share:.0%} of the prompt",
        if_rival="no order of the prompts is found in the cache",
        change="put what all prompts share (instructions, tools, documents) before what changes (time, user, question)",
        claims=claims_of_hits(facts, kv, order.movable_share),
        fixes=(Change(removed={"compute.prefill": saved_share(kv, order.movable_share)}),),
    )  # fmt: skip


def show_shared_part_comes_late(facts: Accounts) -> Reading | None:
    """What prompts have in common behind something that differs."""
    found = prompt_order(facts.rows) if is_joined(facts) else None
    if found is None:
        return prefix_outcome("miss_diverged", what="follow a part that differs")(facts)
    return Reading(
        f"{found.movable_share:.0%} of the prompt tokens stood in an earlier prompt, behind a part that differs",
        found.movable_share < NEGLIGIBLE,
        "requests: movable_tokens, prefix_shared_tokens",
        found.movable_share,
    )


CAUSE = Cause(
    key="prefix_order",
    lifecycles=("memory", "token"),
    object="order of the prompt",
    kind="workload",
    rival="cold traffic: prompts with nothing in common",
    rival_key="own_prefill",
    name="order inside the prompts",
    asks="Does a changing part stand before the shared one?",
    measurement="sojourn lint of the run, or the same prompts with the shared part first",
    figures=(show_shared_part_comes_late,),
    booked=(*PREFILL_TIME, *WAITS),
    missing=KNOWN_OUTCOMES,
    complaints={"high_ttft": 7, "product_latency_poor": 6},
    reads={
        Records: Rule(read_records, accounts=PROMPT_ACCOUNTS),
        Accounts: lose_prompts(
            outcome="miss_diverged",
            words="prompts differ before the part that they share",
            change="the part that changes behind the part that is shared",
            lifecycles=("memory", "compute", "request"),
            object="prefix cache",
            rival="cold traffic",
            rival_key="",
        ),
    },
)
