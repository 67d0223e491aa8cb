"""A full KV block that can be found by its prefix."""

import msgspec


class CachedBlock(msgspec.Struct, gc=False, eq=False):
    """A cached block's place in the tree. The garbage collector need not look at it: it points to the root only."""

    block: int
    parent: "CachedBlock | None"
    key: bytes
    children: int = 0
    idle_since: int | None = None  # logical time; None while a live request reads the block
    depth: int = 0  # blocks before it
    uses: int = 0  # requests that found it in the cache while it was idle
    reused_at_age: int | None = None  # the age of a reuse that is not counted yet: its request may be refused
    queue: int = 0  # of the eviction policy
    idle_ns: int = 0  # for a policy with a clock
