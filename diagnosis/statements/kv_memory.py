"""Room for KV in the same memory, and the pool that holds it."""

from typing import NamedTuple

from sojourn.diagnosis.evidence import Accounts, Client
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.proposal import all_of
from sojourn.metrics.memory.plan import GIB
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import section

KV_ACCOUNTS = ("memory.blocked", "memory.preempted", "memory.recompute")
WASTED = 0.25  # of the positions in active blocks: with it a pool holds a third less than it could
LEAKED = 0.1  # of the pool: less costs nothing that a client sees
USUAL_SIZES = (16, 32)  # of blocks
BLOCKS = "steps: blocks_active, slots_written; requests: scheduled_ns, finished_ns"
BLOCK_SIZE = 16  # tokens, where a run does not say


def pool_claims(facts: Accounts, excess: Excess) -> dict[str, float] | None:
    """What lacking blocks cost; None where blocks were not short."""
    by_blocks = facts.waits.get("kv_blocks", 0.0)
    claims = all_of(KV_ACCOUNTS) | ({"request.queue": by_blocks} if by_blocks else {})
    return claims if sum(excess.share(name) * each for name, each in claims.items()) >= 0.1 else None


class SameMemory(NamedTuple):
    """A change in words and as a replay: `fix.kv_scale` times the tokens in the same memory."""

    words: str
    fix: Change


def is_sized_in_bytes(facts: Client) -> bool:
    """Whether the bytes of the pool are what was chosen, or what the device has left."""
    return "num_kv_blocks" not in facts.chosen


def host_gib(facts: Client, blocks: int) -> float:
    """GiB that so many blocks take; 0 where nobody recorded what a token takes."""
    of_token = section(facts.meta, "model_shape").get("kv_bytes_per_token") or 0
    return blocks * (facts.engine.get("block_size") or BLOCK_SIZE) * of_token / GIB
