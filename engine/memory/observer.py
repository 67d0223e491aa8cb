"""The observer of a block pool: it learns what requests do to blocks, and changes nothing."""

from collections.abc import Sequence
from typing import Any, Protocol

from sojourn.metrics.records.step import Reuse


class BlockOwner(Protocol):
    """A request as the observer sees it."""

    arrival_index: int
    id: str
    prompt_tokens: int
    token_ids: list[int]
    root_hash: bytes  # parent of its first block's hash
    fork_of: str | None
    parts: dict[str, Any]  # the observer writes "prefix", a PrefixReport

    @property
    def reads_cache(self) -> bool: ...

    def block_hashes(self, block_size: int, count: int) -> list[bytes]: ...


class BlockObserver:
    """Ignores all events. A subclass that books them must not change blocks or requests, but for its part."""

    has_times = False  # `take_times` has something to return
    wants_evictions = False  # `on_evict` does something

    def __init__(self) -> None:
        self.now_ns = 0  # begin of the turn; the loop sets it

    def on_lookup(self, count: int) -> None:
        """A request is about to take the first `count` blocks of its prefix from the cache, if it is admitted."""

    def on_lookup_failed(self, owner: BlockOwner) -> None:
        """The owner was not admitted, and returned them."""

    def on_load(self, owner: BlockOwner, tiers: Sequence[str]) -> None:
        """The owner is about to be admitted; blocks behind those of the lookup come from these tiers, one each."""

    def on_admit(self, owner: BlockOwner, num_tokens: int, is_first: bool) -> None:
        """The owner was admitted, for the first time or again, and has the blocks of all its tokens."""

    def on_share(self, owner: BlockOwner, leader: BlockOwner, count: int) -> None:
        """A waiting fork reads the first `count` blocks of its leader, or those of them that have become full."""

    def on_copy(self, owner: BlockOwner, index: int) -> None:
        """The owner no longer reads that block, but a copy of its own that is not full."""

    def on_grow(self, owner: BlockOwner) -> None:
        """The owner got more blocks while it runs."""

    def on_evict(self, owner: BlockOwner, keys: Sequence[bytes]) -> None:
        """The pool evicted these blocks for the owner, before it was admitted or grew."""

    def on_fill(self, owner: BlockOwner, count: int) -> None:
        """The first `count` blocks of the owner are full and committed."""

    def on_leave_window(self, owner: BlockOwner, begin: int, end: int) -> None:
        """The owner, which runs, no longer reads its blocks from number `begin` to `end`."""

    def on_release(self, owner: BlockOwner, num_committed_tokens: int) -> None:
        """The owner frees all its blocks."""

    def flush(self) -> None:
        """Books the events since the last call, after the tokens of a step were published. Each admitted owner that is
        no fork then has the report of its first lookup."""

    def take_times(self) -> Reuse:
        """The times that were sampled since the last call."""
        return Reuse()
