"""What the blocks of a device may be copied to, and come back from: the pool's view of the tiers below it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class LowerTiers(Protocol):
    """The block manager reports what blocks hold, and asks for what continues a prefix."""

    wants_evictions: bool  # `evicted` is called

    def found(self, request: Any, num_cached: int) -> list[bytes]:
        """The blocks that continue the prefix of a request behind `num_cached`, and can be loaded at once."""
        ...

    def load(self, request: Any, keys: Sequence[bytes], blocks: Sequence[int]) -> list[str]:
        """The next step copies `found` blocks to blocks of the device. Returns the tier that each came from."""
        ...

    def release(self, request: Any) -> None:
        """The request was admitted or ended: nothing is held for it any more."""
        ...

    def filled(self, key: bytes, block: int) -> None:
        """A block of the device is full and findable."""
        ...

    def reused(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """An admitted request reads these cached blocks of the device."""
        ...

    def evicted(self, block: int, key: bytes) -> None:
        """The device gives a cached block up; its contents stay until the next launched step."""
        ...


class NoTiers:
    """The device is all there is."""

    wants_evictions = False

    def found(self, request: Any, num_cached: int) -> list[bytes]:
        return []

    def load(self, request: Any, keys: Sequence[bytes], blocks: Sequence[int]) -> list[str]:
        return []

    def release(self, request: Any) -> None: ...

    def filled(self, key: bytes, block: int) -> None: ...

    def reused(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None: ...

    def evicted(self, block: int, key: bytes) -> None: ...


class BlockIndex(Protocol):
    """The blocks that one tier holds, by key."""

    name: str
    on_change: Callable[[bytes, bool], None] | None  # key, and whether it can be read now

    def __contains__(self, key: bytes) -> bool: ...

    def readable(self) -> list[bytes]: ...
