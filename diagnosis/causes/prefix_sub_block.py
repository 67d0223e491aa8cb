"""What prompts share is shorter than a block, or ends within one, and only whole blocks are found."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import WAITS
from sojourn.diagnosis.statements import prefixes
from sojourn.diagnosis.statements.accounts import lose_prompts, scale_setting
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.symptom_tree.reading import KNOWN_OUTCOMES, PREFILL_TIME, prefix_outcome

SIZES_DOWN = (16, 32, 64)  # block sizes that kernels like


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    kv = facts.kv()
    if kv is None or kv.use is None:
        return None
    lost = kv.use.outcomes.get("miss_sub_block", 0.0)
    shared = kv.shared
    best = shared.block_size_for() if shared is not None else None
    size = min(best or SIZES_DOWN[0], max(SIZES_DOWN[0], kv.block_size // 2))
    if lost < prefixes.WORTH_SHARING or size >= kv.block_size:
        return None
    gained = lost if shared is None else max(0.0, shared.caught.get(size, lost) - kv.use.hit_share)
    settings = prefixes.block_size(facts, kv, size)
    return Proposal(
        cause=f"a block has {kv.block_size} tokens, and {lost:.0%} of the prompt tokens are shared in parts that fill "
        "no block",
        evidence=[
            *prefixes.missed_tokens(kv, "miss_sub_block",
                           "are shared with an earlier prompt, and the last block of that is not full"),
            *([evidence(f"shared beginnings have {shared.p50_tokens:,.0f} tokens (median); {shared.below_block:.0%} "
                        "are shorter than a block", shared.below_block, "share", "requests: prefix_shared_tokens",
                        supports=shared.below_block >= 0.5, weight=1)] if shared is not None else []),
            *excess_evidence(excess, prefixes.PROMPT_ACCOUNTS),
        ],
        measurement=f"the same scenario with blocks of {size} tokens",
        settings=settings,
        if_cause=f"cached tokens rise by about {gained:.0%} of the prompt",
        if_rival=f"cached tokens stay near {kv.use.hit_share:.0%}",
        claims=prefixes.claims_of_hits(kv, gained),
        fixes=(Change(settings=settings), Change(settings=prefixes.block_size(facts, kv, SIZES_DOWN[0]))),
    )  # fmt: skip


CAUSE = Cause(
    key="prefix_sub_block",
    lifecycles=("memory",),
    object="block size",
    kind="policy",
    rival="prompts that differ early",
    rival_key="prefix_order",
    name="block size against the prefix",
    asks="Is the shared prefix below one block?",
    measurement="the same scenario with half the block_size",
    figures=(prefix_outcome("miss_sub_block", what="lie in a shared part below one block"),),
    booked=(*PREFILL_TIME, *WAITS),
    missing=KNOWN_OUTCOMES,
    complaints={"high_ttft": 8, "product_latency_poor": 7},
    reads={
        Records: Rule(read_records, accounts=prefixes.PROMPT_ACCOUNTS),
        Accounts: lose_prompts(
            outcome="miss_sub_block",
            words="prefixes end within a block, which is not shared",
            change="a smaller block_size",
            settings=lambda facts: scale_setting(facts, "block_size", 0.5),
            lifecycles=("memory", "compute", "request"),
            object="prefix cache",
            rival="cold traffic",
            rival_key="",
        ),
    },
)
