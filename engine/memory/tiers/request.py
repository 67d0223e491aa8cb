"""A request as the tiers see it."""

from typing import Protocol

from metrics.memory.kv_load import KVLoad


class TierReader(Protocol):
    """It has a prefix, and a report that the tiers write."""

    arrival_index: int
    kv_load: KVLoad | None

    def reusable_hashes(self, block_size: int) -> list[bytes]: ...
