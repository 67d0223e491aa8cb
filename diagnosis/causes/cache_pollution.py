"""Prompts that nobody asks for again take the room of those that are shared."""

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import WAITS
from sojourn.diagnosis.statements import prefixes
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.kv_memory import is_sized_in_bytes
from sojourn.diagnosis.symptom_tree.reading import EVICTED, KNOWN_OUTCOMES, PREFILL_TIME

KEEP_WHAT_WAS_FOUND = ("segmented-lru", "worth")  # policies of eviction


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    kv = facts.kv()
    if kv is None or kv.use is None or kv.eviction is None or kv.eviction.missed_share < prefixes.WORTH_SHARING / 3:
        return None
    lost = kv.eviction
    if lost.one_shot_share < prefixes.ONE_SHOT:
        return None
    worst = next(iter(lost.by_class.items()), ("", 1.0))
    target = prefixes.pool_for_reuse(kv)
    more = (Change(settings={"num_kv_blocks": target}),) if target else ()
    policies = tuple(Change(settings={"eviction_policy": name}) for name in KEEP_WHAT_WAS_FOUND)
    return Proposal(
        cause=f"prompts that share nothing with any other evicted {lost.one_shot_share:.0%} of what was missed"
        + (f", most of them of {worst[0]}" if worst[0] else ""),
        evidence=[
            *prefixes.missed_tokens(kv, "miss_evicted", "had been in the cache and were evicted"),
            evidence(f"{lost.one_shot_share:.0%} of it was taken by prompts that were never reused",
                     lost.one_shot_share, "share", "requests: evicted_by, prefix_source", weight=3),
            *excess_evidence(excess, prefixes.PROMPT_ACCOUNTS),
        ],
        measurement="the same scenario without the class of one-shot prompts",
        if_cause="no shared prefix is evicted",
        if_rival="shared prefixes evict each other all the same",
        change=f"send {worst[0] or 'one-shot prompts'} to a server of their own, a pool of {target} blocks, or "
        f"eviction_policy={' or '.join(KEEP_WHAT_WAS_FOUND)}, which keeps what was found before",
        claims=prefixes.claims_of_hits(facts, kv, lost.missed_share),
        fixes=policies if is_sized_in_bytes(facts) else (*more, *policies),
    )  # fmt: skip


CAUSE = Cause(
    key="cache_pollution",
    lifecycles=("memory", "request"),
    object="prefix cache",
    kind="workload",
    rival="a pool that is too small for what is shared",
    rival_key="cache_thrash",
    name="prefix cache, polluted",
    asks="Do prompts of one use push the shared ones out?",
    measurement="the same scenario without its prompts of one use",
    figures=(EVICTED,),
    booked=(*PREFILL_TIME, *WAITS),
    missing=KNOWN_OUTCOMES,
    complaints={"high_ttft": 6, "vram_fills_quickly": 5, "product_latency_poor": 5},
    reads={Records: Rule(read_records, accounts=prefixes.PROMPT_ACCOUNTS)},
)
