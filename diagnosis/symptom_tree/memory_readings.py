"""Readings of the KV pool and of the prefix cache."""

from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.memory_facts import prompt_order
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading, prefix_outcome


def kv_pool(facts: Facts) -> Reading | None:
    if facts.steps is None:
        return None
    steps, waits = facts.steps, facts.waits.get("kv_blocks", 0.0)
    return Reading(
        f"KV use peaks at {steps.kv_use_max:.0%} of {steps.pool_blocks:,} blocks, with {steps.preemptions} preemptions "
        f"and {waits:.0%} of the waiting for blocks",
        steps.preemptions == 0 and waits < NEGLIGIBLE,
        "steps: blocks_*, preempted_ids; requests: waits",
        steps.kv_use_max,
    )


def leaked_blocks(facts: Facts) -> Reading | None:
    """Blocks that are active beyond what the requests inside the server can hold."""
    kv = facts.kv()
    if kv is None or kv.leak is None:
        return None
    leak = kv.leak
    return Reading(
        f"{leak.blocks:,} of {kv.pool_blocks:,} blocks are active beyond what the requests in the server can hold",
        not leak.stays or leak.share_of_pool < NEGLIGIBLE,
        "steps: blocks_active; requests: scheduled_ns, finished_ns",
        min(1.0, leak.share_of_pool),
    )


def evictions_hurt(facts: Facts) -> Reading | None:
    return prefix_outcome("miss_evicted", what="were in the cache once and had been evicted")(facts)


def prefixes_repeat(facts: Facts) -> Reading | None:
    """What a cache without limit would have hit, against what was hit."""
    if facts.cached_share is None:
        return None
    ideal = max(facts.prefix.infinite_share if facts.prefix is not None else 0.0, facts.declared_shared_share)
    gap = max(0.0, ideal - facts.cached_share)
    return Reading(
        f"{facts.cached_share:.0%} of the prompt tokens came from the cache, and a cache without limit "
        f"would have had {ideal:.0%}",
        gap < NEGLIGIBLE,
        "requests: cached_tokens, infinite_hit_tokens",
        gap,
    )


def prefix_cache_is_on(facts: Facts) -> Reading | None:
    setting = facts.engine.get("prefix_caching")
    if setting is None:
        return None
    found = prefixes_repeat(facts)
    if setting:
        return Reading("prefix_caching is on", True, "run.json: engine")
    return found and Reading(f"prefix_caching is off; {found.statement}", found.rules_out, found.source, found.share)


def shared_part_comes_late(facts: Facts) -> Reading | None:
    """What prompts have in common behind something that differs."""
    found = prompt_order(facts.rows) if facts.joined else None
    if found is None:
        return prefix_outcome("miss_diverged", what="follow a part that differs")(facts)
    return Reading(
        f"{found.movable_share:.0%} of the prompt tokens stood in an earlier prompt, behind a part that differs",
        found.movable_share < NEGLIGIBLE,
        "requests: movable_tokens, prefix_shared_tokens",
        found.movable_share,
    )


def half_blocks(facts: Facts) -> Reading | None:
    """The empty slots of the last blocks: measured, else half a block of a request."""
    kv = facts.kv()
    if kv is not None and kv.fragmentation is not None:
        share = kv.fragmentation.tail_share
        return Reading(
            f"{share:.0%} of the slots in active blocks are empty, since a request's last block of {kv.block_size} is "
            "not full",
            share < NEGLIGIBLE,
            "steps: blocks_active, slots_written; requests: prompt_tokens, output_tokens",
            share,
        )
    size = facts.engine.get("block_size")
    if not size or facts.work is None:
        return None
    tokens = facts.work.prompt_tokens + facts.work.output_tokens
    share = size / 2 / (size / 2 + tokens)
    return Reading(
        f"half a block of {size} slots is {share:.0%} of what a request of {tokens:,.0f} tokens takes",
        share < NEGLIGIBLE,
        "run.json: block_size; requests: prompt_tokens, output_tokens",
        share,
    )


def lost_by_routing(facts: Facts) -> Reading | None:
    """One server holds all that was ever computed."""
    fleet = facts.fleet()
    if fleet is None or fleet.pooled is None:
        return None
    use = fleet.pooled.fleet
    return Reading(
        f"{use.lost_share:.0%} of the prompt tokens were in the cache of another server than the one that was chosen",
        use.lost_share < NEGLIGIBLE / 10,
        "requests: server, prompt_block_hashes",
        use.lost_share,
    )
