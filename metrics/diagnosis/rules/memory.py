"""Causes in the lifecycle of memory: the pool of KV blocks and the prefix cache."""

import math
from dataclasses import replace

from metrics.diagnosis.capacity import FULL, batch_for, batch_within_tpot, kv_batch, load
from metrics.diagnosis.evidence import Facts
from metrics.diagnosis.excess import Excess
from metrics.diagnosis.rules.blamed import blamed_group
from metrics.diagnosis.rules.candidate import (
    EXPLAINS_ENOUGH,
    WAITS,
    Candidate,
    basis,
    evidence,
    excess_evidence,
    gain,
    missing_share,
    rerun,
)
from metrics.diagnosis.verdict import Evidence, Fix, Probe

KV_ACCOUNTS = ("memory.blocked", "memory.preempted", "memory.recompute")
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
TWICE = 2  # the place of a pool twice as large in Prefix.resized


def kv_pool(facts: Facts, excess: Excess | None) -> Candidate | None:
    """Requests wait for KV blocks, or lose theirs and pay for them again."""
    steps = facts.steps
    if steps is None or steps.model is None or facts.work is None:
        return None
    by_blocks = facts.waits.get("kv_blocks", 0.0)
    accounts = (*KV_ACCOUNTS, "request.queue") if by_blocks >= 0.5 else KV_ACCOUNTS
    if excess is not None and excess.share(*accounts) < EXPLAINS_ENOUGH:
        return None
    if excess is None and not (by_blocks >= 0.5 or steps.preemptions):
        return None
    cap = facts.engine.get("max_num_seqs") or math.inf
    relieved = load(facts, batch=min(cap, batch_within_tpot(facts)))
    if math.isnan(relieved) or relieved >= FULL:  # more blocks would only move the queue
        return None
    now = load(facts)
    blocks = suggested_blocks(facts)
    chosen = "num_kv_blocks" in facts.chosen
    gained = gain(facts, accounts)
    recomputed = steps.recomputed_tokens / steps.tokens if steps.tokens else 0.0
    room, needed = kv_batch(facts), batch_for(facts)
    preempted = f"preemptions fall from {steps.preemptions} to 0, " if steps.preemptions else ""
    return Candidate(
        gain=gained,
        key="kv_pool",
        lifecycles=["memory", "request"],
        object="KV block pool",
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
            evidence(f"load / capacity is {now:.2f} with this pool and {relieved:.2f} with enough blocks", now, "ratio",
                     "steps: fit of wall time; client: due_ns"),
        ],
        probe=Probe(
            measurement="the same scenario with a larger pool",
            command=rerun(facts, num_kv_blocks=blocks),
            rival="overload: the device is full, and the pool fills because of it",
            if_cause=f"{preempted}load / capacity falls from {now:.2f} to {relieved:.2f}, {gained}",
            if_rival=f"{missing_share(excess)} stays, with the waiting booked to request.queue",
        ),
        fix=Fix(change=f"num_kv_blocks={blocks}" if chosen else
                f"room for {blocks} blocks: more device memory, a smaller KV type, shorter contexts", gain=str(gained),
                basis=basis(accounts)),
    )  # fmt: skip


def suggested_blocks(facts: Facts) -> int:
    """Blocks with which the pool is no longer what limits the batch; at least twice what there is."""
    pool = facts.steps.pool_blocks
    block = facts.engine.get("block_size") or 16
    each = math.ceil((facts.work.prompt_tokens + facts.work.output_tokens) / block)
    needed = max(2 * pool, KV_HEADROOM * each * batch_for(facts))
    return math.ceil(needed / ROUND_BLOCKS) * ROUND_BLOCKS


def prefix_recomputed(facts: Facts, excess: Excess | None) -> Candidate | None:
    """Prompts begin alike, and each pays for the beginning again."""
    prefix = facts.prefix
    # What an infinite cache would have hit was measured where the server tells; else the scenario declares it
    shared = facts.declared_shared_share if prefix is None else prefix.infinite
    cached = facts.cached_share
    if excess is None or cached is None or facts.work is None:
        return None
    if shared < WORTH_SHARING or cached >= CACHE_WORKS * shared:
        return None
    accounts = ("compute.prefill", "request.interference", *WAITS)
    if excess.share(*accounts) < EXPLAINS_ENOUGH:
        return None
    with_cache = replace(facts.work, computed_tokens=max(1.0, facts.work.prompt_tokens * (1 - shared)))
    now, then_load = load(facts), load(facts, work=with_cache)
    if math.isnan(then_load) or then_load >= FULL:
        return None
    off = facts.engine.get("prefix_caching") is False
    saved = 1 - with_cache.computed_tokens / facts.work.computed_tokens
    gained = gain(facts, accounts, saved)
    return Candidate(
        gain=gained,
        key="prefix_recomputed",
        lifecycles=["memory", "compute", "request"],
        object="prefix cache",
        cause=f"{shared:.0%} of the prompt tokens are alike between requests and "
        + ("the prefix cache is off" if off else f"the cache gave only {cached:.0%}"),
        kind="policy",
        evidence=[
            *_shared(facts),
            *excess_evidence(excess, accounts),
            evidence(f"load / capacity is {now:.2f}, and {then_load:.2f} if the shared part is computed once", now,
                     "ratio", "steps: fit of wall time; client: due_ns"),
        ],
        probe=Probe(
            measurement="the same scenario with the prefix cache on" if off else "the same scenario with a larger pool",
            command=rerun(facts, prefix_caching="true") if off else
            rerun(facts, num_kv_blocks=suggested_blocks(facts)),
            rival="cold traffic: prompts that only look alike",
            if_cause=f"cached tokens rise to about {shared:.0%} of the prompt, computed ones fall by {saved:.0%}",
            if_rival=f"cached tokens stay near {cached:.0%}, and {missing_share(excess)} stays",
        ),
        fix=Fix(change="prefix_caching=true" if off else f"num_kv_blocks={suggested_blocks(facts)}", gain=str(gained),
                basis=basis(accounts, saved)),
    )  # fmt: skip


def _shared(facts: Facts) -> list[Evidence]:
    """What could have come from the cache and did not, why, and what a larger pool would change."""
    prefix, cached = facts.prefix, facts.cached_share
    if prefix is None:
        return [
            evidence(f"the scenario shares {facts.declared_shared_share:.0%} of the prompt tokens; {cached:.0%} came "
                     "from the cache", cached, "share", "run.json: scenario.workload; requests: cached_tokens")
        ]  # fmt: skip
    found = [
        evidence(f"a cache without eviction would have hit {prefix.infinite:.0%} of the prompt tokens; this one hit "
                 f"{cached:.0%}", cached, "share", "requests: infinite_hit_tokens, cached_tokens")
    ]  # fmt: skip
    misses = {name: share for name, share in prefix.outcomes.items() if name in MISSED and share >= 0.01}
    for name, share in sorted(misses.items(), key=lambda item: -item[1]):
        mended = name in ("miss_evicted", "miss_disabled")
        found.append(
            evidence(f"{share:.0%} of the prompt tokens {MISSED[name]}", share, "share", "requests: prefix_outcomes",
                     supports=mended)
        )  # fmt: skip
    if len(prefix.resized) > TWICE:
        hit = prefix.resized[TWICE]
        found.append(
            evidence(f"a pool of twice the size would have hit {hit:.0%} for the same requests in the same order", hit,
                     "share", "requests: resized_hit_tokens", supports=hit > cached + 0.01)
        )  # fmt: skip
    return found
