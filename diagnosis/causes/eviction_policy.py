"""The chosen policy of eviction gives away what LRU would have kept in a pool of the same size."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import WAITS
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.prefixes import LRU, OUTCOMES, PROMPT_ACCOUNTS, WORTH_SHARING, claims_of_hits
from sojourn.diagnosis.symptom_tree.reading import EVICTED, KNOWN_OUTCOMES, PREFILL_TIME

RESIZED = f"{OUTCOMES}, resized_hit_tokens"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    kv, chosen = facts.kv(), facts.engine.get("eviction_policy") or LRU
    if chosen == LRU or kv is None or kv.use is None or kv.curve is None:
        return None
    # The miss-ratio curve is of LRU, whichever policy runs
    with_lru = kv.curve.hit_share(kv.pool_blocks)
    gained = with_lru - kv.use.hit_share
    if gained < WORTH_SHARING:
        return None
    settings: dict[str, object] = {"eviction_policy": LRU}
    if facts.engine.get("eviction_ttl_seconds") is not None:
        settings["eviction_ttl_seconds"] = None
    return Proposal(
        cause=f"eviction_policy={chosen} evicts cached prefixes that are used again, and LRU would keep them",
        evidence=[
            evidence(f"the cache hit {kv.use.hit_share:.0%} of the prompt tokens; LRU would have hit {with_lru:.0%} in "
                     f"the same {kv.pool_blocks} blocks", with_lru, "share", RESIZED, weight=4),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
        ],
        measurement="the same scenario with LRU",
        settings=settings,
        if_cause=f"cached tokens rise from {kv.use.hit_share:.0%} to about {with_lru:.0%} of the prompt",
        if_rival=f"cached tokens stay, and so does {missing_share(excess)}",
        claims=claims_of_hits(facts, kv, gained),
        fixes=(Change(settings=settings),),
    )  # fmt: skip


CAUSE = Cause(
    key="eviction_policy",
    lifecycles=("memory",),
    object="eviction of cached prefixes",
    kind="policy",
    rival="a pool that is too small, whatever the policy",
    rival_key="cache_thrash",
    asks="Are the wrong prefixes evicted?",
    measurement="the same scenario with eviction_policy=lru",
    figures=(EVICTED,),
    booked=(*PREFILL_TIME, *WAITS),
    missing=KNOWN_OUTCOMES,
    complaints={"high_ttft": 5, "product_latency_poor": 4},
    reads={Records: Rule(read_records, accounts=PROMPT_ACCOUNTS)},
)
