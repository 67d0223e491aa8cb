"""A consumer of KV events, written from vLLM's wire format and not from our encoder: the oracle of their tests."""

from dataclasses import dataclass, field

import msgspec

NAMES = {
    "BlockStored": (
        "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys",
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip
REQUIRED = {"BlockStored": 7, "BlockRemoved": 2, "AllBlocksCleared": 0}


def decoded(batch: bytes, wire_format: str) -> list[dict]:
    """The events of a batch as dictionaries. Asserts the types that consumers rely on."""
    seconds, events, rank = msgspec.msgpack.decode(batch)
    assert isinstance(seconds, float) and rank == 0 and events
    return [_fields(event, wire_format) for event in events]


def _fields(event: dict | list, wire_format: str) -> dict:
    if wire_format == "array":
        assert isinstance(event, list)
        fields = {"type": event[0]} | dict(zip(NAMES[event[0]], event[1:], strict=False))
    else:
        assert isinstance(event, dict)
        fields = event
    names = NAMES[fields["type"]]
    assert {"type", *names[: REQUIRED[fields["type"]]]} <= fields.keys() <= {"type", *names}
    if fields["type"] == "BlockStored":
        count = len(fields["block_hashes"])
        assert len(fields["token_ids"]) in (0, count * fields["block_size"])
        assert fields.get("extra_keys") is None or len(fields["extra_keys"]) == count
    assert all(isinstance(each, int) and 0 <= each < 2**64 for each in fields.get("block_hashes", ()))
    return fields


@dataclass
class KVEventIndex:
    """What the events say: the blocks of each medium, and for each the tokens from the beginning of its sequence."""

    wire_format: str = "map"
    strict: bool = True  # every parent is there: no window gives blocks back
    media: dict[str, set[int]] = field(default_factory=lambda: {"GPU": set(), "CPU": set(), "STORAGE": set()})
    prefixes: dict[int, tuple] = field(default_factory=dict)  # block → extra keys of the chain, and its tokens
    nameless: set[int] = field(default_factory=set)  # blocks of which an event gave the hash alone

    def apply(self, batch: bytes) -> None:
        for event in decoded(batch, self.wire_format):
            if event["type"] == "AllBlocksCleared":
                for blocks in self.media.values():
                    blocks.clear()
            elif event["type"] == "BlockRemoved":
                for block in event["block_hashes"]:
                    self.media[event["medium"]].remove(block)  # KeyError: it was never stored
            else:
                self._store(event)

    def _store(self, event: dict) -> None:
        size, parent, medium = event["block_size"], event["parent_block_hash"], event["medium"]
        held = self.media[medium]
        for index, block in enumerate(event["block_hashes"]):
            assert block not in held, "a block is stored twice"
            held.add(block)
            if medium == "GPU" and self.strict:
                assert parent is None or parent in held, "a block is stored above one that is not there"
            if tokens := event["token_ids"][index * size : (index + 1) * size]:
                above = self.prefixes[parent] if parent is not None else ()
                extra = (event.get("extra_keys") or [None] * (index + 1))[index]
                self.prefixes[block] = (*above, (tuple(extra or ()), tuple(tokens)))
            else:
                self.nameless.add(block)
            parent = block
