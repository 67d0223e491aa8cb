"""KV events as servers send them, without the token ids: vLLM's of both forms, SGLang's, and ours.

A batch is the array [seconds since 1970, events, rank]. An event is a map with its name under "type", or an array that
begins with its name (docs/fleet.md). Token ids are skipped where they stand: no object is made of them.
"""

import math
from collections import Counter
from typing import Any

import msgspec

from sojourn.metrics.errors import RunDataError
from sojourn.metrics.records import KvEventRecord

GPU = "GPU"  # the device, whatever it is; also the medium of events that name none
# What servers call the same medium: SGLang's names, and those of forks.
MEDIA = {"": GPU, "CPU_PINNED": "CPU", "HOST": "CPU", "DISK": "STORAGE"}
LARGEST_BLOCK = 1 << 20  # tokens
LONGEST_NAME = 64  # characters of a medium or a session
HASH_MASK = (1 << 64) - 1
GROUP_FACTOR = 0x9E3779B97F4A7C15  # 2^64 / the golden ratio: KV cache groups of a hybrid model share hashes

BlockName = int | bytes


class MalformedBatch(RunDataError):
    """What a socket gave is no batch of KV events."""


class Stored(msgspec.Struct, tag_field="type", tag="BlockStored", gc=False):
    """`token_ids`, `extra_keys` and all else are not declared, so the decoder skips them."""

    block_hashes: list[BlockName]
    block_size: int
    parent_block_hash: BlockName | None = None
    medium: str | None = None
    group_idx: int | None = None
    session_id: str | None = None


class Removed(msgspec.Struct, tag_field="type", tag="BlockRemoved", gc=False):
    block_hashes: list[BlockName]
    medium: str | None = None
    group_idx: int | None = None


class Cleared(msgspec.Struct, tag_field="type", tag="AllBlocksCleared", gc=False):
    pass


class StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[BlockName]
    parent_block_hash: BlockName | None
    token_ids: msgspec.Raw  # a slice of the message, which is dropped with it
    block_size: int
    lora_id: msgspec.Raw = msgspec.Raw()
    medium: str | None = None
    lora_name: msgspec.Raw = msgspec.Raw()
    extra_keys: msgspec.Raw = msgspec.Raw()
    group_idx: int | None = None


class RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[BlockName]
    medium: str | None = None
    group_idx: int | None = None


class ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    seconds: float
    events: list[msgspec.Raw]
    rank: int | None = None


class _Named(msgspec.Struct, gc=False):
    type: str


class KvBatch(msgspec.Struct, gc=False):
    seconds: float | None  # since 1970; None where the sender's clock says nothing that can be
    changes: list[KvEventRecord]  # without a time: at 0. Those of another KV cache group have other hashes
    unknown: Counter[str]  # events of other types, by name


_batch = msgspec.msgpack.Decoder(_Batch).decode
_map = msgspec.msgpack.Decoder(Stored | Removed | Cleared).decode
_array = msgspec.msgpack.Decoder(StoredArray | RemovedArray | ClearedArray).decode
_name_of_map = msgspec.msgpack.Decoder(_Named).decode
_name_of_array = msgspec.msgpack.Decoder(list[Any]).decode


def decode_batch(payload: bytes) -> KvBatch:
    """Raises MalformedBatch. An event of an unknown type is counted, and the others are taken."""
    try:
        batch = _batch(payload)
        changes: list[KvEventRecord] = []
        unknown: Counter[str] = Counter()
        for raw in batch.events:
            _add(changes, unknown, raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedBatch(f"a message is no batch of KV events: {error}") from None
    seconds = batch.seconds if math.isfinite(batch.seconds) and 0 < batch.seconds < 1e11 else None
    return KvBatch(seconds, changes, unknown)


def _add(changes: list[KvEventRecord], unknown: Counter[str], raw: msgspec.Raw) -> None:
    """Appends the event to the changes; blocks that leave one by one become one change."""
    content = bytes(raw)
    is_array = content[:1] in _ARRAYS
    try:
        event = (_array if is_array else _map)(content)
    except msgspec.ValidationError:
        name = _name(content, is_array)
        if name in KNOWN:
            raise
        unknown[name[:LONGEST_NAME]] += 1
        return
    if isinstance(event, Cleared | ClearedArray):
        changes.append(KvEventRecord(0, "cleared"))
        return
    medium, group = medium_of(event.medium), event.group_idx or 0
    hashes = [short_hash(each, group) for each in event.block_hashes]
    if isinstance(event, Removed | RemovedArray):
        last = changes[-1] if changes else None
        if last is not None and last.kind == "removed" and last.medium == medium:
            last.hashes.extend(hashes)
        else:
            changes.append(KvEventRecord(0, "removed", hashes, medium=medium))
        return
    if not 0 < event.block_size <= LARGEST_BLOCK:
        raise msgspec.ValidationError(f"block_size is {event.block_size}")
    parent = None if event.parent_block_hash is None else short_hash(event.parent_block_hash, group)
    session = event.session_id if isinstance(event, Stored) else None
    session = session and session[:LONGEST_NAME]
    changes.append(KvEventRecord(0, "stored", hashes, parent, event.block_size, medium, session=session))


def _name(content: bytes, is_array: bool) -> str:
    """Of an event that fits none of the types. Raises DecodeError where it has none."""
    if not is_array:
        return _name_of_map(content).type
    values = _name_of_array(content)
    if not values or not isinstance(values[0], str):
        raise msgspec.ValidationError("an event has no name")
    return values[0]


def medium_of(name: str | None) -> str:
    """`CPU` of SGLang's `CPU_PINNED`, and so on."""
    word = (name or "").upper()[:LONGEST_NAME]
    return MEDIA.get(word, word)


def short_hash(block: BlockName, group: int = 0) -> int:
    """64 bits, signed. Of longer hashes the last ones, which is what vLLM itself sends as a number."""
    value = int.from_bytes(block[-8:], "big") if isinstance(block, bytes) else block & HASH_MASK
    if group:
        value = (value + group * GROUP_FACTOR) & HASH_MASK
    return value - (1 << 64) if value >> 63 else value


KNOWN = ("BlockStored", "BlockRemoved", "AllBlocksCleared")
_ARRAYS = {bytes([first]) for first in (*range(0x90, 0xA0), 0xDC, 0xDD)}  # how msgpack begins an array
