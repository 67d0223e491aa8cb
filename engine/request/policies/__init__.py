"""The registry of scheduling policies. A policy is one class in one file here, and one member of this tuple.

The setting `policy` takes its choices from the registry.
"""

from collections.abc import Mapping
from typing import Any

from engine.memory.block_pool import BlockPool
from engine.request.policies.fair_share import FairShare
from engine.request.policies.fcfs import Fcfs
from engine.request.policies.prefill_first import PrefillFirst
from engine.request.policies.priority import Priority
from engine.request.policies.shortest import ShortestPrefillFirst
from engine.request.policies.static import StaticBatching
from engine.request.policy import Policy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Fcfs, Priority, ShortestPrefillFirst, FairShare, StaticBatching, PrefillFirst)
}


def make_policy(settings: Mapping[str, Any], pool: BlockPool) -> Policy:
    """The policy that the fields of an EngineConfig choose, for a scheduler over this pool."""
    policy = POLICIES[settings["policy"]]
    value = settings.get(policy.setting)
    return policy(pool, settings["max_num_seqs"], *([] if value is None else [value]))
