"""Causes in the lifecycle of memory: the pool of KV blocks and the prefix cache."""

import math
from dataclasses import replace

from metrics.diagnosis.capacity import FULL, batch_within_tpot, comfortable_batch, kv_batch, kv_blocks, load
from metrics.diagnosis.excess import Excess
from metrics.diagnosis.facts import Facts
from metrics.diagnosis.rules.cause import EXPLAINS_ENOUGH, WAITS, Proposal, all_of, cause
from metrics.diagnosis.rules.shared_evidence import blamed_group, excess_evidence, load_evidence, missing_share
from metrics.diagnosis.verdict import Evidence, evidence
from metrics.replay.prediction import Change

KV_ACCOUNTS = ("memory.blocked", "memory.preempted", "memory.recompute")
PROMPT_ACCOUNTS = ("compute.prefill", "request.interference", *WAITS)
KV_HEADROOM = 1.25  # requests grow while they run, and lengths vary around their mean
ROUND_BLOCKS = 16  # a suggestion is rounded up to a number that one would type
# A prefix is worth a cache when it is a fifth of the prompts, and the cache fails when it gives less than half of that.
WORTH_SHARING = 0.2
CACHE_WORKS = 0.5
# Of records.PREFIX_OUTCOMES, what a sentence says of them.
MISSED = {
    "miss_evicted": "had been in the cache and were evicted",
    "miss_disabled": "would have been hits if the cache were on",
    "miss_in_flight": "were being computed by another request at that moment: a pool of any size misses them",
    "miss_diverged": "differ from all that followed the same beginning: the order of the prompt decides that",
}
MENDED = ("miss_evicted", "miss_disabled")  # by a setting; the other misses are the workload's
TWICE = 2  # the place of a pool twice as large in Prefix.resized


@cause(lifecycles=("memory", "request"), object="KV block pool", kind="capacity", needs=("load",),
       rival="overload: the device is full, and the pool fills because of it",
       symptom="vram_fills_quickly")  # fmt: skip
def kv_pool(facts: Facts, excess: Excess | None) -> Proposal | None:
    """Requests wait for KV blocks, or lose theirs and pay for them again."""
    steps, by_blocks = facts.steps, facts.waits.get("kv_blocks", 0.0)
    accounts = (*KV_ACCOUNTS, "request.queue") if by_blocks >= 0.5 else KV_ACCOUNTS
    if excess is not None and excess.share(*accounts) < EXPLAINS_ENOUGH:
        return None
    if excess is None and not (by_blocks >= 0.5 or steps.preemptions):
        return None
    cap = facts.engine.get("max_num_seqs") or math.inf
    now, relieved = load(facts), load(facts, batch=min(cap, batch_within_tpot(facts)))
    if relieved >= FULL:  # more blocks would only move the queue
        return None
    blocks = suggested_blocks(facts)
    chosen = "num_kv_blocks" in facts.chosen
    recomputed = steps.recomputed_tokens / steps.tokens if steps.tokens else 0.0
    room, needed = kv_batch(facts), comfortable_batch(facts)
    preempted = f"preemptions fall from {steps.preemptions} to 0, " if steps.preemptions else ""
    return Proposal(
        cause=f"the pool of {steps.pool_blocks} blocks holds {room:.0f} requests of this length at a time, and "
        + (f"the load needs {needed}" if needed > round(room) else "the peaks of the load need more"),
        kind="policy" if chosen else "capacity",
        evidence=[
            *excess_evidence(excess, accounts),
            *blamed_group(facts, excess),
            evidence(f"{by_blocks:.0%} of the waiting was for KV blocks, or behind a request that waited for them",
                     by_blocks, "share", "requests: waits; steps: refusals", supports=by_blocks >= 0.5),
            evidence(f"KV use was {steps.kv_use_p50:.0%} at the median and {steps.kv_use_max:.0%} at its peak",
                     steps.kv_use_max, "share", "steps: blocks_active, blocks_pinned", supports=steps.kv_use_max > 0.9),
            evidence(f"{steps.preemptions} preemptions, {recomputed:.1%} of all tokens were computed again",
                     steps.preemptions, "preemptions", "steps: preempted_ids, kinds", supports=steps.preemptions > 0),
            load_evidence(f"load / capacity is {now:.2f} with this pool and {relieved:.2f} with enough blocks", now),
        ],
        measurement="the same scenario with a larger pool",
        settings={"num_kv_blocks": blocks},
        if_cause=f"{preempted}load / capacity falls from {now:.2f} to {relieved:.2f}",
        if_rival=f"{missing_share(excess)} stays, with the waiting booked to request.queue",
        change="" if chosen else
        f"room for {blocks} blocks: more device memory, a smaller KV type, shorter contexts",
        claims=all_of(accounts),
        fixes=(Change(settings={"num_kv_blocks": blocks}),),
    )  # fmt: skip


def suggested_blocks(facts: Facts) -> int:
    """Blocks with which the pool is no longer what limits the batch; at least twice what there is."""
    needed = max(2 * facts.steps.pool_blocks, KV_HEADROOM * kv_blocks(facts) * comfortable_batch(facts))
    return math.ceil(needed / ROUND_BLOCKS) * ROUND_BLOCKS


@cause(lifecycles=("memory", "compute", "request"), object="prefix cache", kind="policy",
       accounts=PROMPT_ACCOUNTS, needs=("excess", "load"),
       rival="cold traffic: prompts that only look alike")  # fmt: skip
def prefix_recomputed(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts begin alike, and each pays for the beginning again."""
    # What an infinite cache would have hit: measured where the server records it, else declared by the scenario
    shared = facts.declared_shared_share if facts.prefix is None else facts.prefix.infinite
    cached = facts.cached_share
    if cached is None or shared < WORTH_SHARING or cached >= CACHE_WORKS * shared:
        return None
    with_cache = replace(facts.work, computed_tokens=max(1.0, facts.work.prompt_tokens * (1 - shared)))
    now, then = load(facts), load(facts, work=with_cache)
    if then >= FULL:
        return None
    off = facts.engine.get("prefix_caching") is False
    saved = 1 - with_cache.computed_tokens / facts.work.computed_tokens
    return Proposal(
        cause=f"{shared:.0%} of the prompt tokens are alike between requests and "
        + ("the prefix cache is off" if off else f"the cache gave only {cached:.0%}"),
        evidence=[
            *_shared(facts),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
            load_evidence(f"load / capacity is {now:.2f}, and {then:.2f} if the shared part is computed once", now),
        ],
        measurement=f"the same scenario with {'the prefix cache on' if off else 'a larger pool'}",
        settings={"prefix_caching": "true"} if off else {"num_kv_blocks": suggested_blocks(facts)},
        if_cause=f"cached tokens rise to about {shared:.0%} of the prompt, computed ones fall by {saved:.0%}",
        if_rival=f"cached tokens stay near {cached:.0%}, and {missing_share(excess)} stays",
        claims=all_of(PROMPT_ACCOUNTS, saved),
        fixes=(Change(settings={"prefix_caching": True} if off else {"num_kv_blocks": suggested_blocks(facts)}),),
    )


def _shared(facts: Facts) -> list[Evidence]:
    """What could have come from the cache and did not, why, and what a larger pool would change."""
    prefix, cached = facts.prefix, facts.cached_share
    if prefix is None:
        return [
            evidence(f"the scenario shares {facts.declared_shared_share:.0%} of the prompt tokens; {cached:.0%} came "
                     "from the cache", cached, "share", "run.json: scenario.workload; requests: cached_tokens")
        ]  # fmt: skip
    misses = {name: share for name, share in prefix.outcomes.items() if name in MISSED and share >= 0.01}
    found = [
        evidence(f"a cache without eviction would have hit {prefix.infinite:.0%} of the prompt tokens; this one hit "
                 f"{cached:.0%}", cached, "share", "requests: infinite_hit_tokens, cached_tokens"),
        *(evidence(f"{share:.0%} of the prompt tokens {MISSED[name]}", share, "share", "requests: prefix_outcomes",
                   supports=name in MENDED) for name, share in sorted(misses.items(), key=lambda item: -item[1])),
    ]  # fmt: skip
    if len(prefix.resized) > TWICE:
        hit = prefix.resized[TWICE]
        found.append(
            evidence(f"a pool of twice the size would have hit {hit:.0%} for the same requests in the same order", hit,
                     "share", "requests: resized_hit_tokens", supports=hit > cached + 0.01)
        )  # fmt: skip
    return found
