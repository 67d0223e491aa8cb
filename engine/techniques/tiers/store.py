"""A slower tier as the bookkeeping sees it: it reads and writes blocks by key, beside the loop."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sojourn.engine.kv_source import KVSource


class Moved(NamedTuple):
    """A read or a write that ended."""

    key: bytes
    is_read: bool
    ok: bool
    nbytes: int
    began_ns: int
    ended_ns: int
    error: str = ""  # a sentence, where it failed
    is_refusal: bool = False  # it fails whenever it is tried
    is_absent: bool = False  # a prefill server did not store the block: no failure of the read
    announced_ns: int = 0  # when a prefill server said that it has computed the block, or that it will not


class Answer(NamedTuple):
    """How many of the blocks that were asked for, from the first on, a shared store has."""

    number: int  # of the question
    num_known: int
    ended_ns: int


class BlockStore(Protocol):
    """Moves blocks between slots of host memory and a slower medium. No call waits for the medium.

    Operations on one key end in the order in which they were begun. A read that fails, or finds a damaged block, ends
    with `ok` False and leaves the slot undefined.
    """

    name: str  # one of metrics.memory.kv_load.TIERS
    block_bytes: int  # that a block takes there

    def known(self) -> list[bytes]:
        """The keys that it holds at its start, oldest first."""
        ...

    def read(self, key: bytes, slot: int) -> None: ...

    def write(self, key: bytes, slot: int) -> None: ...

    def remove(self, key: bytes) -> None: ...

    def finished(self) -> list[Moved]:
        """What ended since the last call."""
        ...

    def wait(self) -> None:
        """A moment, or until something has ended."""
        ...

    def close(self) -> None:
        """Forgets what is queued."""
        ...


class PeerBlockStore(BlockStore, Protocol):
    """The host memory of prefill servers. Its reads begin together, at `fetch`."""

    def fetch(self, source: KVSource, keys: Sequence[bytes]) -> None:
        """Reads the blocks that `read` named since the last call, of the prompt with these keys. Then the prefill
        server gets its blocks back, also where there is nothing to read. Blocks of a transfer are read as they are
        computed; each read ends, whatever becomes of the prefill server."""
        ...

    def heard_ns(self, transfer_id: str) -> int:
        """When a prefill server last said that it computes this; 0: never, or it is over."""
        ...


class Questions(Protocol):
    """Asks a store to which others write, too: what it holds is known by asking. No call waits for an answer."""

    def ask(self, number: int, keys: Sequence[bytes]) -> None:
        """For a chain of blocks."""
        ...

    def answers(self) -> list[Answer]:
        """Since the last call."""
        ...


class Medium(Protocol):
    """Where a slower tier keeps its blocks. Its calls wait; a MediumStore makes them in threads.

    Reads come from one thread; writes and removals from another one.
    """

    name: str  # one of metrics.memory.kv_load.TIERS
    block_bytes: int

    def known(self) -> list[bytes]:
        """The keys that it holds, oldest first."""
        ...

    def read(self, key: bytes, slot: int) -> bool:
        """False for a block that is gone or damaged."""
        ...

    def write(self, key: bytes, slot: int) -> None: ...

    def remove(self, key: bytes) -> None: ...

    def failed(self, operation: str, error: Exception) -> None:
        """An operation raised that error (`read`, `write` or `remove`): says so in the log."""
        ...

    def close(self) -> None:
        """No call is under way, and none follows."""
        ...
