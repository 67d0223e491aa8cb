"""The registry of scheduling policies. A policy is one class in one file here, and one member of this tuple.

The setting `policy` takes its choices from the registry.
"""

from collections.abc import Mapping
from typing import Any

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.request.policies.fair_share import FairShare
from sojourn.engine.request.policies.fcfs import Fcfs
from sojourn.engine.request.policies.policy import Policy
from sojourn.engine.request.policies.prefill_first import PrefillFirst
from sojourn.engine.request.policies.priority import Priority
from sojourn.engine.request.policies.shortest import ShortestPrefillFirst
from sojourn.engine.request.policies.static import StaticBatching

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Fcfs, Priority, ShortestPrefillFirst, FairShare, StaticBatching, PrefillFirst)
}


def make_policy(settings: Mapping[str, Any], pool: BlockPool) -> Policy:
    """The policy that the fields of an EngineConfig choose, for a scheduler over this pool."""
    policy = POLICIES[settings["policy"]]
    value = settings.get(policy.setting)
    return policy(pool, settings["max_num_seqs"], *([] if value is None else [value]))
