"""A request as the tiers see it."""

from typing import Any, Protocol


class TierReader(Protocol):
    """It has a prefix, and a report that the tiers write."""

    arrival_index: int
    booking: Any  # when the loop took it in
    parts: dict[str, Any]  # "tiers" is a KVLoad

    def reusable_hashes(self, block_size: int) -> list[bytes]: ...
