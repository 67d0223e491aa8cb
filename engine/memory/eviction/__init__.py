"""The registry of eviction policies. A policy is one class in one file here, and one member of this tuple.

The setting `eviction_policy` takes its choices from the registry.
"""

from sojourn.engine.memory.eviction.lfu import Lfu
from sojourn.engine.memory.eviction.lru import Lru
from sojourn.engine.memory.eviction.policy import EvictionPolicy
from sojourn.engine.memory.eviction.segmented_lru import SegmentedLru
from sojourn.engine.memory.eviction.ttl import Ttl
from sojourn.engine.memory.eviction.worth import Worth

EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {
    policy.name: policy for policy in (Lru, Lfu, Ttl, SegmentedLru, Worth)
}


def make_eviction_policy(name: str, num_blocks: int, ttl_seconds: float | None = None) -> EvictionPolicy:
    """The policy of that name for a pool of `num_blocks`."""
    if name == Ttl.name:
        assert ttl_seconds is not None, "the settings are checked before"
        return Ttl(ttl_seconds)
    return EVICTION_POLICIES[name](num_blocks)
