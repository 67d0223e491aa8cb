"""KV events as vLLM's consumers read them: msgpack in two versions (docs/fleet.md). No sockets, no clock.

A batch is the array [seconds since 1970, events, data-parallel rank]. An event is a map with its name under "type",
as vLLM writes it since pull request 42892, or an array that begins with its name, as before. Fields and meanings are
those of vllm/distributed/kv_events.py.
"""

from typing import Any, Literal

import msgspec

WireFormat = Literal["map", "array"]
RANK = 0  # a server is one data-parallel rank
ARRAY_FIELDS = {"BlockStored": 8, "BlockRemoved": 2, "AllBlocksCleared": 0}  # that consumers of arrays know


class BlockStored(msgspec.Struct, tag_field="type", tag=True, omit_defaults=True):
    """Blocks of one chain, each the parent of the next, that can be read from now on."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the first one; None where it begins a sequence, or is not known
    token_ids: list[int]  # of all the blocks; empty where only the hashes are known
    block_size: int  # tokens
    lora_id: int | None  # vLLM's own number, which this server does not have
    medium: str | None  # GPU: the device, whatever it is; CPU; STORAGE
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None  # by block: the adapter's name; for a chain's first the cache salt


class BlockRemoved(msgspec.Struct, tag_field="type", tag=True, omit_defaults=True):
    """Blocks that a medium no longer holds."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag_field="type", tag=True):
    """Nothing of what was stored before is held any more, in any medium."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared
_encode = msgspec.msgpack.Encoder().encode


def encode_batch(events: list[KVEvent], seconds: float, wire_format: WireFormat) -> bytes:
    shown = events if wire_format == "map" else [_positions(event) for event in events]
    return _encode([seconds, shown, RANK])


def _positions(event: KVEvent) -> list[Any]:
    """The event as an array, without the defaults at its end."""
    name = type(event).__name__
    values = [name, *msgspec.structs.astuple(event)][: 1 + ARRAY_FIELDS[name]]
    if name == "BlockStored" and values[-1] is None:
        values.pop()
    return values
