"""Causes in the prefix cache: each reason that the server records for a part of a prompt that was not found."""

import math
from dataclasses import replace

from sojourn.diagnosis.capacity import FULL, best_load
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.kv_facts import KvFacts
from sojourn.diagnosis.memory_facts import ENOUGH
from sojourn.diagnosis.rules.cause import Proposal, cause
from sojourn.diagnosis.rules.same_memory import SameMemory, host_tier, is_sized_in_bytes
from sojourn.diagnosis.rules.shared_evidence import excess_evidence, missing_share
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change

# Work on prompts, and the waits that it makes longer.
PROMPT_ACCOUNTS = ("compute.prefill", "request.interference", "request.queue", "memory.blocked")
WORTH_SHARING = 0.15  # of the prompt tokens: a hit of less changes a time to first token by less than its noise
MOSTLY = 0.5  # of the waiting
ONE_SHOT = 0.5  # of what was evicted and missed: taken by prompts that nobody asks for again
ROUND_BLOCKS = 16  # a suggestion is rounded up to a number that one would type
SIZES_DOWN = (16, 32, 64)  # block sizes that kernels like
LRU = "lru"  # the policy by default
KEEP_WHAT_WAS_FOUND = ("segmented-lru", "worth")  # policies of eviction
OUTCOMES = "requests: prefix_outcomes, infinite_hit_tokens"


def _saved(kv: KvFacts, share: float) -> float:
    """Of the prompt tokens that are computed now, the part that a hit of `share` more of all would spare."""
    return min(1.0, share / max(1.0 - kv.use.hit_share, 1e-9))


def claims_of_hits(kv: KvFacts, share: float) -> dict[str, float]:
    """What a hit of `share` more of all prompt tokens spares: that part of each account of prompts."""
    return dict.fromkeys(PROMPT_ACCOUNTS, _saved(kv, share))


def _missed(kv: KvFacts, outcome: str, what: str) -> list[Evidence]:
    share = kv.use.outcomes.get(outcome, 0.0)
    return [
        evidence(f"{share:.0%} of the prompt tokens {what} (recorded as `{outcome}`)", share, "share", OUTCOMES,
                 weight=3),
        evidence(f"a cache without eviction would have hit {kv.use.infinite_share:.0%} of the prompt tokens; this one "
                 f"hit {kv.use.hit_share:.0%}", kv.use.hit_share, "share", OUTCOMES, weight=0),
    ]  # fmt: skip


@cause(lifecycles=("memory", "compute", "request"), object="prefix cache", kind="policy", accounts=PROMPT_ACCOUNTS,
       rival="cold traffic: prompts that only look alike", rival_key="own_prefill")  # fmt: skip
def prefix_cache_off(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts begin alike, and each pays for the beginning again, because the cache is off."""
    if facts.engine.get("prefix_caching") is not False:
        return None
    kv = facts.kv()
    share = kv.use.infinite_share if kv is not None and kv.use is not None else facts.declared_shared_share
    if share < WORTH_SHARING:
        return None
    saved = _saved(kv, share) if kv is not None and kv.use is not None else share
    return Proposal(
        cause=f"{share:.0%} of the prompt tokens stand at the beginning of earlier prompts, and the cache is off",
        evidence=[
            *(_missed(kv, "miss_disabled", "would have been hits if the cache were on")
              if kv is not None and kv.use is not None else
              [evidence(f"the scenario shares {share:.0%} of the prompt tokens", share, "share",
                        "run.json: scenario.workload", weight=2)]),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
        ],
        measurement="the same scenario with the prefix cache on",
        settings={"prefix_caching": True},
        if_cause=f"cached tokens rise to about {share:.0%} of the prompt",
        if_rival=f"cached tokens stay near 0%, and {missing_share(excess)} stays",
        claims=dict.fromkeys(PROMPT_ACCOUNTS, saved),
        fixes=(Change(settings={"prefix_caching": True}),),
    )  # fmt: skip


@cause(lifecycles=("memory", "request"), object="prefix cache", kind="capacity", accounts=PROMPT_ACCOUNTS,
       rival="cold traffic: the prompts share nothing with earlier ones", rival_key="prefix_order")  # fmt: skip
def cache_thrash(facts: Facts, excess: Excess) -> Proposal | None:
    """What prompts share is evicted before it is asked for again: the reuse does not fit into the pool."""
    kv = facts.kv()
    if kv is None or kv.use is None or kv.eviction is None or kv.eviction.missed_share < WORTH_SHARING:
        return None
    curve, lost = kv.curve, kv.eviction
    target = pool_for_reuse(kv)
    hit = hit_with(kv, target)
    chosen = {"num_kv_blocks", "kv_cache_gib", "memory_fraction"} & facts.chosen
    polluted = lost.one_shot_share >= ONE_SHOT
    # The curve is of LRU. What another policy gives away of it at this very size is no matter of size.
    in_this_pool = max(kv.use.hit_share, kv.curve.hit_share(kv.pool_blocks) if curve is not None else 0.0)
    by_policy = in_this_pool - kv.use.hit_share if facts.engine.get("eviction_policy", LRU) != LRU else 0.0
    host = host_tier(facts, target, kv.pool_blocks)
    more = tuple(Change(settings={"num_kv_blocks": size}) for size in (target, 2 * target) if size)
    # A tier keeps what nobody reads. Requests that run need blocks of the device.
    keeps_size = host is not None and is_sized_in_bytes(facts) and facts.waits.get("kv_blocks", 0.0) < MOSTLY
    return Proposal(
        kind="policy" if chosen else "capacity",
        cause=f"{lost.missed_share:.0%} of the prompt tokens were in the cache and had been evicted: a pool of "
        f"{kv.pool_blocks} blocks is smaller than the prefixes that are reused",
        evidence=[
            *_missed(kv, "miss_evicted", "had been in the cache and were evicted"),
            *([evidence(f"a pool of {target} blocks would have hit {hit:.0%} for the same requests in the same order",
                        hit, "share", "requests: resized_hit_tokens", supports=hit > kv.use.hit_share + 0.05,
                        weight=2)] if curve is not None else []),
            *([evidence(f"half of the reused blocks lie more than {lost.reuse_distance_p50_blocks:,.0f} blocks "
                        "back", lost.reuse_distance_p50_blocks, "blocks", "steps: reuse_distance_blocks",
                        supports=lost.thrashes)] if lost.reuse_distance_p50_blocks is not None else []),
            *([evidence(f"{lost.one_shot_share:.0%} of it was taken by prompts that share nothing: they pollute the "
                        "cache", lost.one_shot_share, "share", "requests: evicted_by, prefix_source", supports=False,
                        weight=3)] if polluted else []),
            *([evidence(f"LRU would have hit {in_this_pool:.0%} in a pool of this very size", in_this_pool, "share",
                        "requests: resized_hit_tokens", supports=False, weight=3)]
              if by_policy >= WORTH_SHARING else []),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
        ],
        measurement=f"the same scenario with {'a tier in host memory' if keeps_size else 'a larger pool'}",
        # No target where nobody recorded how large the pool is
        settings=dict(host.fix.settings) if keeps_size else {"num_kv_blocks": target} if target else None,
        if_cause=f"cached tokens rise from {kv.use.hit_share:.0%} to about {hit:.0%} of the prompt",
        if_rival=f"cached tokens stay, and so does {missing_share(excess)}",
        change=_more_room(kv, target, host, host_first=keeps_size),
        claims=claims_of_hits(kv, max(0.0, hit - kv.use.hit_share - by_policy)),
        fixes=(host.fix,) if keeps_size else more,
    )  # fmt: skip


def _more_room(kv: KvFacts, target: int, host: SameMemory | None, *, host_first: bool) -> str:
    """The larger pool and the tier below it, in words; first what the memory of the device allows."""
    pool = f"num_kv_blocks={target} (now {kv.pool_blocks})" if target else "a larger pool"
    ways = [pool] if host is None else [host.words, pool] if host_first else [pool, host.words]
    return ", or ".join([*ways, "a cache that more servers share by prefix"])


@cause(lifecycles=("memory", "request"), object="prefix cache", kind="workload", accounts=PROMPT_ACCOUNTS,
       rival="a pool that is too small for what is shared", rival_key="cache_thrash")  # fmt: skip
def cache_pollution(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts that nobody asks for again take the room of those that are shared."""
    kv = facts.kv()
    if kv is None or kv.use is None or kv.eviction is None or kv.eviction.missed_share < WORTH_SHARING / 3:
        return None
    lost = kv.eviction
    if lost.one_shot_share < ONE_SHOT:
        return None
    worst = next(iter(lost.by_class.items()), ("", 1.0))
    target = pool_for_reuse(kv)
    more = (Change(settings={"num_kv_blocks": target}),) if target else ()
    policies = tuple(Change(settings={"eviction_policy": name}) for name in KEEP_WHAT_WAS_FOUND)
    return Proposal(
        cause=f"prompts that share nothing with any other evicted {lost.one_shot_share:.0%} of what was missed"
        + (f", most of them of {worst[0]}" if worst[0] else ""),
        evidence=[
            *_missed(kv, "miss_evicted", "had been in the cache and were evicted"),
            evidence(f"{lost.one_shot_share:.0%} of it was taken by prompts that were never reused",
                     lost.one_shot_share, "share", "requests: evicted_by, prefix_source", weight=3),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
        ],
        measurement="the same scenario without the class of one-shot prompts",
        settings=None,
        if_cause="no shared prefix is evicted",
        if_rival="shared prefixes evict each other all the same",
        change=f"send {worst[0] or 'one-shot prompts'} to a server of their own, a pool of {target} blocks, or "
        f"eviction_policy={' or '.join(KEEP_WHAT_WAS_FOUND)}, which keeps what was found before",
        claims=claims_of_hits(kv, lost.missed_share),
        fixes=policies if is_sized_in_bytes(facts) else (*more, *policies),
    )  # fmt: skip


@cause(lifecycles=("memory",), object="block size", kind="policy", accounts=PROMPT_ACCOUNTS,
       rival="prompts that differ early", rival_key="prefix_order")  # fmt: skip
def prefix_sub_block(facts: Facts, excess: Excess) -> Proposal | None:
    """What prompts share is shorter than a block, or ends within one, and only whole blocks are found."""
    kv = facts.kv()
    if kv is None or kv.use is None:
        return None
    lost = kv.use.outcomes.get("miss_sub_block", 0.0)
    shared = kv.shared
    best = shared.block_size_for() if shared is not None else None
    size = min(best or SIZES_DOWN[0], max(SIZES_DOWN[0], kv.block_size // 2))
    if lost < WORTH_SHARING or size >= kv.block_size:
        return None
    gained = lost if shared is None else max(0.0, shared.caught.get(size, lost) - kv.use.hit_share)
    settings = block_size(facts, kv, size)
    return Proposal(
        cause=f"a block has {kv.block_size} tokens, and {lost:.0%} of the prompt tokens are shared in parts that fill "
        "no block",
        evidence=[
            *_missed(kv, "miss_sub_block", "are shared with an earlier prompt, and the last block of that is not full"),
            *([evidence(f"shared beginnings have {shared.p50_tokens:,.0f} tokens (median); {shared.below_block:.0%} "
                        "are shorter than a block", shared.below_block, "share", "requests: prefix_shared_tokens",
                        supports=shared.below_block >= 0.5, weight=1)] if shared is not None else []),
            *excess_evidence(excess, PROMPT_ACCOUNTS),
        ],
        measurement=f"the same scenario with blocks of {size} tokens",
        settings=settings,
        if_cause=f"cached tokens rise by about {gained:.0%} of the prompt",
        if_rival=f"cached tokens stay near {kv.use.hit_share:.0%}",
        claims=claims_of_hits(kv, gained),
        fixes=(Change(settings=settings), Change(settings=block_size(facts, kv, SIZES_DOWN[0]))),
    )  # fmt: skip


@cause(lifecycles=("memory", "token"), object="order of the prompt", kind="workload", accounts=PROMPT_ACCOUNTS,
       rival="cold traffic: prompts with nothing in common", rival_key="own_prefill")  # fmt: skip
def prefix_order(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts have much in common, behind something that differs in each: a prefix cache finds nothing of it."""
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
        settings=None,
        if_cause=f"with the shared part first, cached tokens rise by about {order.movable_share:.0%} of the prompt",
        if_rival="no order of the prompts is found in the cache",
        change="put what all prompts share (instructions, tools, documents) before what changes (time, user, question)",
        claims=claims_of_hits(kv, order.movable_share),
        fixes=(Change(removed={"compute.prefill": _saved(kv, order.movable_share)}),),
    )  # fmt: skip


def pool_for_reuse(kv: KvFacts) -> int:
    """Blocks that hold nearly all of what is asked for again, and beside it what requests that run hold."""
    running = 0.0 if kv.fragmentation is None else kv.fragmentation.pool_use * kv.pool_blocks
    if kv.curve is None:
        return 2 * kv.pool_blocks
    blocks = kv.curve.blocks_for()
    if blocks is None:
        # Twice the middle distance: half of what is asked for again lies beyond the middle, little beyond twice of it
        distance = kv.eviction.reuse_distance_p50_blocks if kv.eviction is not None else None
        blocks = max(int(kv.curve.blocks[-1]), int(2 * (distance or 0.0)))
    return math.ceil((max(blocks, kv.pool_blocks) + running) / ROUND_BLOCKS) * ROUND_BLOCKS


def hit_with(kv: KvFacts, blocks: int) -> float:
    """The share of the prompt tokens that a pool of so many blocks hits; beyond the curve nearly all that is shared."""
    if kv.curve is None or blocks > kv.curve.blocks[-1]:
        return ENOUGH * kv.use.infinite_share
    return kv.curve.hit_share(blocks)


def avoidable_prompts(facts: Facts) -> list[Evidence]:
    """Against a load that is called too high: prompt tokens that a larger cache, smaller blocks or another order would
    not compute."""
    kv = facts.kv()
    if kv is None or kv.use is None or facts.work is None:
        return []
    in_pool = hit_with(kv, pool_for_reuse(kv))
    spared = {
        "were evicted before their next use": min(kv.use.outcomes.get("miss_evicted", 0.0),
                                                            max(0.0, in_pool - kv.use.hit_share)),
        "would be hits if the cache were on": kv.use.outcomes.get("miss_disabled", 0.0),
        "are shared in parts that fill no block": kv.use.outcomes.get("miss_sub_block", 0.0),
        "stand behind a part that differs": kv.order.movable_share if kv.order is not None else 0.0,
    }  # fmt: skip
    why, share = max(spared.items(), key=lambda item: item[1])
    if share < WORTH_SHARING:
        return []
    saved = _saved(kv, share)
    then = best_load(facts, replace(facts.work, computed_tokens=max(1.0, facts.work.computed_tokens * (1 - saved))))
    return [evidence(f"{share:.0%} of the prompt tokens {why}: without them load / capacity would be {then:.2f}", then,
                     "ratio", OUTCOMES, supports=then >= FULL, weight=4 if then < FULL else 0.5)]  # fmt: skip


def block_size(facts: Facts, kv: KvFacts, size: int) -> dict[str, int]:
    """Another block size with the same room: a number of blocks that was chosen counts in blocks of the old size."""
    settings = {"block_size": size}
    if "num_kv_blocks" in facts.chosen:
        settings["num_kv_blocks"] = max(1, kv.pool_blocks * kv.block_size // size)
    return settings
