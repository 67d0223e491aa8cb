"""Causes in the pool of KV blocks: too few of them, room in them that holds nothing, and blocks that nobody holds."""

import math

from sojourn.diagnosis.capacity import FULL, batch_within_tpot, comfortable_batch, kv_batch, kv_blocks, load
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import EXPLAINS_ENOUGH, Proposal, all_of, cause
from sojourn.diagnosis.rules.prefix import ROUND_BLOCKS, block_size
from sojourn.diagnosis.rules.same_memory import is_sized_in_bytes, smaller_kv, window
from sojourn.diagnosis.rules.shared_evidence import blamed_group, excess_evidence, load_evidence, missing_share
from sojourn.diagnosis.verdict import evidence
from sojourn.metrics.prediction import Change

KV_ACCOUNTS = ("memory.blocked", "memory.preempted", "memory.recompute")
KV_HEADROOM = 1.25  # requests grow while they run, and lengths vary around their mean
WASTED = 0.25  # of the positions in active blocks: with it a pool holds a third less than it could
LEAKED = 0.1  # of the pool: less costs nothing that a client sees
USUAL_SIZES = (16, 32)  # of blocks
BLOCKS = "steps: blocks_active, slots_written; requests: scheduled_ns, finished_ns"


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
    blocks = suggested_blocks(facts)
    chosen = "num_kv_blocks" in facts.chosen
    recomputed = steps.recomputed_tokens / steps.tokens if steps.tokens else 0.0
    room, needed = kv_batch(facts), comfortable_batch(facts)
    smaller = [found for found in (smaller_kv(facts), window(facts)) if found is not None]
    in_bytes, own = is_sized_in_bytes(facts), tuple(each.fix for each in smaller[:1])
    more = tuple(Change(settings={"num_kv_blocks": size}) for size in (blocks, 2 * blocks))
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
            load_evidence(f"load / capacity is {now:.2f} with this pool and {relieved:.2f} with enough blocks", now,
                          supports=relieved < FULL, weight=2 if relieved >= FULL else 0.5),
            *_lost_room(facts),
        ],
        measurement=f"the same scenario with {'smaller keys and values' if in_bytes and own else 'a larger pool'}",
        settings=dict(own[0].settings) if in_bytes and own else {"num_kv_blocks": blocks},
        if_cause=f"{preempted}load / capacity falls from {now:.2f} to {relieved:.2f}",
        if_rival=f"{missing_share(excess)} stays, with the waiting booked to request.queue",
        change="" if chosen else
        f"room for {blocks} blocks: {', '.join(each.words for each in smaller)}{', ' if smaller else ''}"
        "more device memory, shorter contexts",
        claims=all_of(accounts),
        fixes=own or more if in_bytes else (*more, *own),
    )  # fmt: skip


def suggested_blocks(facts: Facts) -> int:
    """Blocks with which the pool no longer limits the batch: what the requests of a moderate load hold together, and
    at least half as much again as there is."""
    needed = KV_HEADROOM * kv_blocks(facts) * max(comfortable_batch(facts), _at_once(facts))
    return math.ceil(max(1.5 * facts.steps.pool_blocks, needed) / ROUND_BLOCKS) * ROUND_BLOCKS


def _at_once(facts: Facts) -> float:
    """Requests in the server at once if none waited, by Little's law; 0 where no rate was offered."""
    served = facts.rows[facts.rows.status == "ok"]
    waits = served[[f"ledger_{name}_ns" for name in ("request_queue", "memory_blocked", "memory_preempted")]]
    inside = served.finished_ns.astype("float64") - served.arrived_ns.astype("float64")
    mean_s = float((inside - waits.astype("float64").sum(axis=1)).mean()) / 1e9
    found = facts.offered_rps * mean_s
    return found if math.isfinite(found) else 0.0


def _lost_room(facts: Facts) -> list:
    """Against a pool that is too small: what of it nobody can use."""
    kv, found = facts.kv(), []
    if kv is None:
        return found
    if kv.leak is not None and kv.leak.stays and kv.leak.share_of_pool >= LEAKED:
        found.append(evidence(f"{kv.leak.share_of_pool:.0%} of the pool is held by no request", kv.leak.share_of_pool,
                              "share", BLOCKS, supports=False, weight=4))  # fmt: skip
    if kv.fragmentation is not None and kv.fragmentation.tail_share >= WASTED and kv.block_size > USUAL_SIZES[-1]:
        share = kv.fragmentation.tail_share
        found.append(evidence(f"{share:.0%} of the positions in active blocks hold nothing", share, "share", BLOCKS,
                              supports=False, weight=4))  # fmt: skip
    return found


def _pool_claims(facts: Facts, excess: Excess) -> dict[str, float] | None:
    """What lacking blocks cost; None where blocks were not short."""
    by_blocks = facts.waits.get("kv_blocks", 0.0)
    claims = all_of(KV_ACCOUNTS) | ({"request.queue": by_blocks} if by_blocks else {})
    return claims if sum(excess.share(name) * each for name, each in claims.items()) >= 0.1 else None


@cause(lifecycles=("memory",), object="block size", kind="policy", needs=("excess", "steps"),
       rival="a pool that is too small for its requests", rival_key="kv_pool")  # fmt: skip
def fragmentation(facts: Facts, excess: Excess) -> Proposal | None:
    """Blocks are so long that requests leave much of their last one empty, and the pool runs out of them."""
    kv = facts.kv()
    found = None if kv is None else kv.fragmentation
    if found is None or found.tail_share < WASTED or kv.block_size <= USUAL_SIZES[-1]:
        return None
    claims = _pool_claims(facts, excess)
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


@cause(lifecycles=("memory",), object="KV block pool", kind="fault", needs=("excess", "steps"),
       rival="a pool that is too small for its requests", rival_key="kv_pool")  # fmt: skip
def block_leak(facts: Facts, excess: Excess) -> Proposal | None:
    """Blocks stay taken after their requests have ended, more and more of them."""
    kv = facts.kv()
    found = None if kv is None else kv.leak
    if found is None or not found.stays or found.share_of_pool < LEAKED:
        return None
    claims = _pool_claims(facts, excess)
    if claims is None:
        return None
    growth = ", ".join(map(str, found.by_stretch))
    return Proposal(
        cause=f"{found.blocks} of {kv.pool_blocks} blocks are taken, and no request holds them: they never return",
        evidence=[
            evidence(f"blocks that nobody holds, in each quarter of the run: {growth}", found.blocks, "blocks", BLOCKS,
                     weight=4),
            evidence(f"each request that ends leaves {found.blocks_per_request:.1f} blocks behind",
                     found.blocks_per_request, "blocks", BLOCKS, weight=0),
            *excess_evidence(excess, (*KV_ACCOUNTS, "request.queue")),
        ],
        measurement="the used blocks of the idle server: `sojourn_memory_kv_blocks` without any request",
        settings=None,
        if_cause="used blocks do not return to 0 on the idle server",
        if_rival="used blocks return to 0 when the last request ends",
        change="find the end of a request that does not release its blocks; until then restart the server regularly",
        claims=claims,
        in_replay=False,
        steps=found.steps,
    )  # fmt: skip
