"""The facts of a run's KV blocks and prefix cache together, as rules read them."""

from dataclasses import dataclass

import pandas as pd

from sojourn.diagnosis.block_facts import Fragmentation, Leak, fragmentation, leak
from sojourn.diagnosis.memory_facts import (
    Eviction,
    PoolCurve,
    PrefixUse,
    PromptOrder,
    SharedLengths,
    eviction,
    pool_blocks,
    pool_curve,
    prefix_use,
    prompt_order,
    shared_lengths,
)

USUAL_BLOCK_SIZE = 16  # tokens: the engine's default, where a run does not say


@dataclass(frozen=True, slots=True)
class KvFacts:
    """What the server recorded of its memory; None where it did not."""

    block_size: int
    pool_blocks: int
    use: PrefixUse | None
    curve: PoolCurve | None
    shared: SharedLengths | None
    order: PromptOrder | None
    eviction: Eviction | None
    fragmentation: Fragmentation | None
    leak: Leak | None


def kv_facts(engine: dict, core: dict, requests: pd.DataFrame, steps: pd.DataFrame) -> KvFacts:
    """`requests` and `steps` are all that the server recorded, warm-up too; `core` is what `run.json` says of it."""
    size = int(engine.get("block_size") or USUAL_BLOCK_SIZE)
    blocks = pool_blocks(steps) or int(core.get("num_kv_blocks") or 0)
    return KvFacts(
        block_size=size,
        pool_blocks=blocks,
        use=prefix_use(requests),
        curve=pool_curve(requests, blocks),
        shared=shared_lengths(requests, size),
        order=prompt_order(requests),
        eviction=eviction(requests, steps, size),
        fragmentation=fragmentation(requests, steps, size),
        leak=leak(requests, steps, size),
    )
