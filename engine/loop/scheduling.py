"""The scheduler that an EngineConfig asks for, with its pool, its policies and its observer of blocks."""

from collections.abc import Sequence

from sojourn.engine.config import EngineConfig, largest_step_tokens
from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.eviction import make_eviction_policy
from sojourn.engine.memory.kv_events import make_kv_event_log
from sojourn.engine.memory.lower_tiers import BlockIndex
from sojourn.engine.memory.observer import BlockObserver
from sojourn.engine.memory.shadow.observer import ShadowObserver
from sojourn.engine.memory.window import FreedWindow
from sojourn.engine.request.policies import make_policy
from sojourn.engine.request.scheduler import Scheduler
from sojourn.engine.request.technique import Technique
from sojourn.engine.request.token_budget import TokenBudget


def make_scheduler(
    config: EngineConfig,
    num_kv_blocks: int,
    budget: TokenBudget | None = None,
    techniques: Sequence[Technique] = (),
    window: FreedWindow | None = None,
    indexes: Sequence[BlockIndex] = (),
) -> Scheduler:
    """The scheduler that an EngineConfig asks for, over a pool of `num_kv_blocks`. `budget` is how it keeps
    max_num_batched_tokens=auto; without one a step of a CPU's largest size is always allowed. `indexes`: of the tiers
    below the pool, whose blocks its events tell of."""
    eviction = make_eviction_policy(config.eviction_policy, num_kv_blocks, config.eviction_ttl_seconds)
    events = make_kv_event_log(config.block_size, config.kv_events_format, indexes) if config.kv_events else None
    pool = BlockPool(num_kv_blocks, config.block_size, config.prefix_caching, eviction, window, events)
    return Scheduler(
        pool,
        make_policy(dict(config), pool),
        make_block_observer(config, pool),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget or largest_step_tokens(config, "cpu"),
        max_prefill_chunk_tokens=config.max_prefill_chunk_tokens,
        max_long_prefills=config.max_long_prefills,
        long_prefill_tokens=config.long_prefill_tokens,
        techniques=techniques,
        micro_batches=config.pipeline_parallel,
    )


def make_block_observer(config: EngineConfig, pool: BlockPool) -> BlockObserver:
    """The observer of the blocks that the setting `telemetry` asks for."""
    return ShadowObserver(pool) if config.telemetry == "full" else BlockObserver()
