"""A request as the tiers see it."""

from typing import Protocol

from sojourn.engine.kv_source import KVSource
from sojourn.metrics.memory.kv_load import KVLoad


class TierReader(Protocol):
    """It has a prefix, and a report that the tiers write."""

    arrival_index: int
    queued_ns: int | None  # the loop took it in
    kv_load: KVLoad | None
    kv_source: KVSource | None  # another server computed its prompt

    def reusable_hashes(self, block_size: int) -> list[bytes]: ...
