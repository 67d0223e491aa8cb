"""What is cached, change by change: the events from which a router learns which server holds which prefix.

Pure bookkeeping. The pool and the tiers report each change when it is made: a block is stored once it is full and
committed, or once its copy from a tier is planned in front of all that reads it. Replaying all events gives the set
of blocks that can be found now.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sojourn.engine.kv_event_wire import BlockRemoved, BlockStored, KVEvent, WireFormat, encode_batch
from sojourn.engine.memory.lower_tiers import BlockIndex

DEVICE = "GPU"  # vLLM's name for the device's memory, also where the device is a CPU
MEDIA = {"host": "CPU", "disk": "STORAGE"}  # by tier; what a shared remote tier holds is no property of one server
HASH_BYTES = 8  # of the key: consumers take integers of 64 bits


class Adapter(Protocol):
    name: str


class BlockWriter(Protocol):
    """A request whose blocks are stored."""

    token_ids: list[int]
    cache_salt: str

    @property
    def adapter(self) -> Adapter | None: ...


@dataclass(slots=True)
class _Known:
    """What an event says of a block, for as long as any medium holds it."""

    parent: int | None
    token_ids: list[int]
    lora_name: str | None
    extra_keys: list[str] | None
    media: set[str] = field(default_factory=set)


def block_hash(key: bytes) -> int:
    """The name of a block on the wire."""
    return int.from_bytes(key[:HASH_BYTES], "big")


class KVEventLog:
    """Collects events until they are taken. `remembers`: tiers hold blocks, too; only a writer knows their tokens."""

    def __init__(
        self,
        block_size: int,
        wire_format: WireFormat = "map",
        *,
        remembers: bool = False,
        clock: Callable[[], float] = time.time,
    ):
        self._size = block_size
        self._format = wire_format
        self._clock = clock  # seconds since 1970
        self._events: list[KVEvent] = []
        self._known: dict[bytes, _Known] | None = {} if remembers else None
        self._leaving: list[bytes] = []  # no medium holds them; a write to a tier may be under way
        self._tiers: list[BlockIndex] = []

    def stored(self, writer: BlockWriter, index: int, key: bytes, parent: bytes | None) -> None:
        """Block number `index` of a sequence can be found; `parent` is the key before it, None for the first."""
        begin = index * self._size
        lora_name = None if writer.adapter is None else writer.adapter.name
        extra_keys = [lora_name] if lora_name is not None else []
        if index == 0 and writer.cache_salt:
            extra_keys.append(writer.cache_salt)
        above = None if parent is None else block_hash(parent)
        token_ids = writer.token_ids[begin : begin + self._size]
        known = _Known(above, token_ids, lora_name, extra_keys or None)
        if self._known is not None:
            known = self._known.setdefault(key, known)
            known.media.add(DEVICE)
        self._append_stored(block_hash(key), known, DEVICE)

    def removed(self, key: bytes, medium: str = DEVICE) -> None:
        """The medium gave the block up."""
        if self._known is not None and (known := self._known.get(key)) is not None:
            known.media.discard(medium)
            if not known.media:
                self._leaving.append(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved) and last.medium == medium:
            last.block_hashes.append(block_hash(key))
        else:
            self._events.append(BlockRemoved([block_hash(key)], medium))

    def stored_in(self, medium: str, key: bytes) -> None:
        """A tier holds the block. Of a block from an earlier process only the hash is known."""
        known = None if self._known is None else self._known.get(key)
        if known is None:
            self._events.append(BlockStored([block_hash(key)], None, [], self._size, None, medium, None))
        else:
            known.media.add(medium)
            self._append_stored(block_hash(key), known, medium)

    def follow(self, index: BlockIndex) -> None:
        """Reports what a tier holds now and from now on."""
        medium = MEDIA[index.name]

        def report(key: bytes, is_readable: bool) -> None:
            if is_readable:
                self.stored_in(medium, key)
            else:
                self.removed(key, medium)

        self._tiers.append(index)
        index.on_change = report
        for key in index.readable():
            self.stored_in(medium, key)

    def take(self) -> bytes | None:
        """The events since the last call as one batch; None where nothing changed."""
        if self._leaving:
            self._forget()
        if not self._events:
            return None
        events, self._events = self._events, []
        return encode_batch(events, self._clock(), self._format)

    def _forget(self) -> None:
        """Drops what was known of blocks that are nowhere any more."""
        assert self._known is not None, "only a log that remembers forgets"
        leaving, self._leaving = self._leaving, []
        for key in leaving:
            known = self._known.get(key)
            if known is None or known.media:
                continue
            if any(key in tier for tier in self._tiers):
                self._leaving.append(key)
            else:
                del self._known[key]

    def _append_stored(self, name: int, block: _Known, medium: str) -> None:
        last = self._events[-1] if self._events else None
        if (
            isinstance(last, BlockStored)
            and last.medium == medium
            and last.token_ids
            and last.block_hashes[-1] == block.parent
            and last.lora_name == block.lora_name
        ):
            last.block_hashes.append(name)
            last.token_ids += block.token_ids
            if last.extra_keys is not None:
                last.extra_keys.append(block.extra_keys)
            return
        extra_keys: list[list[str] | None] | None = None if block.extra_keys is None else [block.extra_keys]
        self._events.append(
            BlockStored(
                [name], block.parent, list(block.token_ids), self._size, None, medium, block.lora_name, extra_keys
            )
        )


def make_kv_event_log(
    block_size: int, wire_format: WireFormat | None, indexes: Sequence[BlockIndex] = ()
) -> KVEventLog:
    """The log of a pool, and of the tiers that only this server reads and writes."""
    events = KVEventLog(block_size, wire_format or "map", remembers=bool(indexes))
    for index in indexes:
        events.follow(index)
    return events
