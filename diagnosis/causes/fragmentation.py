"""Blocks are so long that requests leave much of their last one empty, and the pool runs out of them."""

from sojourn.diagnosis.cause import Accounts, Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements.excess import excess_evidence, missing_share
from sojourn.diagnosis.statements.kv_memory import BLOCKS, KV_ACCOUNTS, USUAL_SIZES, WASTED, pool_claims
from sojourn.diagnosis.statements.prefixes import block_size
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    kv = facts.kv()
    found = None if kv is None else kv.fragmentation
    if found is None or found.tail_share < WASTED or kv.block_size <= USUAL_SIZES[-1]:
        return None
    claims = pool_claims(facts, excess)
    if claims is None:
        return None
    size = USUAL_SIZES[0]
    after, settings = found.tail_share_with(kv.block_size, size), block_size(facts, kv, size)
    return Proposal(
        cause=f"blocks of {kv.block_size} tokens leave {found.tail_share:.0%} of their positions empty, and requests "
        "wait for blocks",
        evidence=[
            evidence(f"{found.unwritten_share:.0%} of the positions in active blocks hold no token, "
                     f"{found.tail_share:.0%} because a request's last block is not full", found.tail_share, "share",
                     BLOCKS, weight=3),
            *excess_evidence(excess, (*KV_ACCOUNTS, "request.queue")),
        ],
        measurement=f"the same scenario with blocks of {size} tokens in the same memory",
        settings=settings,
        if_cause=f"empty positions fall to about {after:.0%}, and the pool holds "
        f"{(1 - after) / max(1 - found.tail_share, 0.05):.1f} times the requests",
        if_rival=f"{missing_share(excess)} stays",
        claims=claims,
        fixes=(Change(settings=settings),),
    )  # fmt: skip


def show_half_blocks(facts: Accounts) -> Reading | None:
    """The empty slots of the last blocks: measured, else half a block of a request."""
    kv = facts.kv() if isinstance(facts, Records) else None
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


CAUSE = Cause(
    key="fragmentation",
    lifecycles=("memory",),
    object="block size",
    kind="policy",
    rival="a pool that is too small for its requests",
    rival_key="kv_pool",
    name="empty slots of blocks",
    asks="Are blocks so large that they stay half empty?",
    measurement="the same scenario with half the block_size",
    figures=(show_half_blocks,),
    complaints={"high_ttft": 10, "high_itl": 2, "low_device_utilisation": 2, "vram_fills_quickly": 2},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
