"""In which order requests are served. A policy is one file; add it to `make_policy` and to the setting `policy`."""

from collections.abc import Callable

from engine.config import EngineConfig
from engine.memory.block_pool import BlockPool
from engine.request.policies.fair_share import FairShare
from engine.request.policies.fcfs import Fcfs
from engine.request.policies.policy import Policy
from engine.request.policies.prefill_first import PrefillFirst
from engine.request.policies.priority import Priority
from engine.request.policies.shortest import ShortestPrefillFirst
from engine.request.policies.static import StaticBatching

POLICIES: dict[str, Callable[[EngineConfig, BlockPool], Policy]] = {
    "fcfs": lambda config, pool: Fcfs(),
    "priority": lambda config, pool: Priority(**_given(ageing=config.priority_ageing)),
    "shortest-prefill-first": lambda config, pool: ShortestPrefillFirst(pool, **_given(ageing=config.shortest_ageing)),
    "fair-share": lambda config, pool: FairShare(**_given(output_weight=config.fair_output_weight)),
    "static": lambda config, pool: StaticBatching(config.max_num_seqs),
    "prefill-first": lambda config, pool: PrefillFirst(**_given(patience=config.prefill_patience)),
}


def make_policy(config: EngineConfig, pool: BlockPool) -> Policy:
    """The policy that an EngineConfig asks for, for a scheduler over this pool."""
    return POLICIES[config.policy](config, pool)


def _given(**settings: int | None) -> dict[str, int]:
    return {name: value for name, value in settings.items() if value is not None}
