"""What prompts share is shorter than a block, or ends within one, and only whole blocks are found."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Means, Proposal, Records, Rule, evidence
from sojourn.diagnosis.foreign_server import span_share
from sojourn.diagnosis.proposal import EXPLAINS_ENOUGH, WAITS
from sojourn.diagnosis.statements import means, prefixes
from sojourn.diagnosis.statements.accounts import DEFINING, lose_prompts, scale_setting
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.refutations import COUNTED_HITS, LARGEST_DEFAULT_BLOCK
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
        claims=prefixes.claims_of_hits(facts, kv, gained),
        fixes=(Change(settings=settings), Change(settings=prefixes.block_size(facts, kv, SIZES_DOWN[0]))),
    )  # fmt: skip


def read_means(facts: Means, excess: Excess) -> Proposal | None:
    """Prompts take the time, and none of them, or of what the scenario says they share, fills a block."""
    view = facts.server
    size, longest = view.reported_settings.get("block_size", ""), view.longest_prompt
    is_on = view.reported_settings.get("prefix_caching", "").lower() == "true"
    beginning = prefixes.beginning_below_a_block(facts)
    if excess.objective != "ttft_ms" or not is_on or not size.isdigit():
        return None
    spent = sum(span_share(view.span(name), excess) for name in prefixes.PROMPT_ACCOUNTS if view.span(name))
    spent, work = max(spent, means.queue_share(view, excess)), means.prompt_work(view)
    if spent < EXPLAINS_ENOUGH or (work or 0.0) < means.PROMPT_WORK:
        return None
    if beginning is not None:
        cause = f"their common beginning of {beginning} tokens is less than a block of {size}, so none is shared"
        cause = f"{facts.declared_shared_share:.0%} of the prompt tokens are alike between requests, and {cause}"
        seen = evidence(f"the scenario shares {beginning} tokens, and a block has {size}", beginning, "tokens",
                        "run.json: scenario.workload", weight=DEFINING)  # fmt: skip
    elif longest is not None and longest <= int(size) and int(size) > LARGEST_DEFAULT_BLOCK:
        cause = f"no prompt fills a block of {size} tokens, so that none is found in the prefix cache"
        seen = evidence(f"all prompts that ended have at most {longest:,.0f} tokens, and a block has {size}: the cache "
                        "is on and holds nothing", longest, "tokens", means.HISTOGRAMS, weight=DEFINING)  # fmt: skip
    else:
        return None
    return Proposal(
        cause=cause,
        evidence=[
            seen,
            evidence(f"prompts are {work:.0%} of the computed tokens", work, "share", means.COUNTERS),
            *([evidence("whether prompts repeat is in no metric of this server", 0.0, "unknown", means.COUNTERS,
                        supports=False)] if beginning is None else []),
        ],
        measurement=f"one replica with {view.settings.get('block', 'the block size')} {SIZES_DOWN[0]}: its hits tell "
        "how much of the prompts repeats",
        settings={},
        if_cause=f"a part of the prompts hits, and {missing_share(excess)} falls",
        if_rival=f"nothing hits, and {missing_share(excess)} stays",
        change=f"{view.settings.get('block', 'the block size')} {SIZES_DOWN[0]}, where the model allows it",
        explained=spent,
        gain=means.time_gained(view, f"{spent:.0%} in queue and prefill"),
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
        Means: Rule(read_means, rival="prompts that share nothing", rival_key="overload", refuted_by=(COUNTED_HITS,)),
    },
)
