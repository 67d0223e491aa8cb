"""Least recently used: the block that became idle first goes first."""

from typing import ClassVar

from sojourn.engine.memory.eviction.policy import EvictionPolicy


class Lru(EvictionPolicy):
    """One queue, in the order of time."""

    name: ClassVar[str] = "lru"
