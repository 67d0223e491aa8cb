"""Blocks stay taken after their requests have ended, more and more of them."""

from sojourn.diagnosis.cause import Cause, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.statements.kv_memory import BLOCKS, KV_ACCOUNTS, LEAKED, pool_claims
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    kv = facts.kv()
    found = None if kv is None else kv.leak
    if found is None or not found.stays or found.share_of_pool < LEAKED:
        return None
    claims = pool_claims(facts, excess)
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
        if_cause="used blocks do not return to 0 on the idle server",
        if_rival="used blocks return to 0 when the last request ends",
        change="find the end of a request that does not release its blocks; until then restart the server regularly",
        claims=claims,
        in_replay=False,
        steps=found.steps,
    )  # fmt: skip


def show_leaked_blocks(facts: Records) -> Reading | None:
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


CAUSE = Cause(
    key="block_leak",
    lifecycles=("memory",),
    object="KV block pool",
    kind="fault",
    rival="a pool that is too small for its requests",
    rival_key="kv_pool",
    name="blocks that nobody owns",
    asks="Do blocks stay taken after their request?",
    measurement="KV blocks in use while no request is in the server",
    figures=(show_leaked_blocks,),
    missing="the active blocks of steps, and when requests held some",
    complaints={"high_ttft": 11, "high_itl": 3, "low_device_utilisation": 3, "vram_fills_quickly": 3},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
