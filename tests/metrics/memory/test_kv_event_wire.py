"""Messages of KV events as servers send them: both forms, three servers, and what is no message at all."""

import gc
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.metrics.memory.kv_event_wire import MalformedBatch, decode_batch, short_hash
from sojourn.metrics.memory.pool_history import PoolHistory
from sojourn.metrics.records import KvEventRecord
from tests.engine.kv_event_index import KVEventIndex
from tests.engine.memory.test_kv_events import play

encode = msgspec.msgpack.encode
TOKEN = 424242


def vllm_stored(**more) -> dict:
    return {
        "type": "BlockStored", "block_hashes": [2**64 - 1, 5], "parent_block_hash": 3, "token_ids": [TOKEN] * 32,
        "block_size": 16, "lora_id": None, "medium": "GPU", "lora_name": "poet", "extra_keys": [["poet"], None],
        "session_id": "chat-7", **more,
    }  # fmt: skip


def sglang_stored(**more) -> dict:
    return {
        "type": "BlockStored", "block_hashes": [-7], "parent_block_hash": None, "token_ids": [[TOKEN, TOKEN]],
        "block_size": 1, "lora_id": None, "medium": "CPU_PINNED", "cache_salt": "secret", **more,
    }  # fmt: skip


@pytest.mark.parametrize("form", ["map", "array"])
def test_what_our_engine_publishes_is_what_a_router_reads(form):
    """The blocks of each medium after all events, against a consumer that was written from vLLM's format."""
    index = KVEventIndex(form)
    simulation = play(5, index, num_blocks=32, host_blocks=24, disk_blocks=40, stores="fill")
    pools: dict[str, PoolHistory] = {}
    for batch in simulation.published.kv_events:
        for change in decode_batch(batch).changes:
            pools.setdefault(change.medium, PoolHistory()).apply(
                KvEventRecord(0, change.kind, change.hashes, change.parent, change.block_size)
            )
    for medium, blocks in index.media.items():
        assert set(pools[medium]._held) == {short_hash(block) for block in blocks} and blocks


def test_fields_of_three_servers():
    batch = decode_batch(encode([1.7e9, [vllm_stored(), sglang_stored()], 1]))
    assert batch.seconds == 1.7e9 and not batch.unknown
    assert batch.changes == [
        KvEventRecord(0, "stored", [-1, 5], 3, 16, "GPU", session="chat-7"),
        KvEventRecord(0, "stored", [-7], None, 1, "CPU"),
    ]  # fmt: skip
    oldest = decode_batch(encode([1.7e9, [["BlockStored", [1], None, [TOKEN] * 16, 16, None], ["BlockRemoved", [1]],
                                          ["AllBlocksCleared"]]]))  # fmt: skip
    assert [change.kind for change in oldest.changes] == ["stored", "removed", "cleared"]


def test_hashes_of_bytes_are_what_vllm_sends_as_numbers():
    digest = bytes(range(32))
    number = int.from_bytes(digest, "big") & (2**64 - 1)
    as_bytes = decode_batch(encode([1.0, [vllm_stored(block_hashes=[digest], parent_block_hash=digest)]])).changes
    as_numbers = decode_batch(encode([1.0, [vllm_stored(block_hashes=[number], parent_block_hash=number)]])).changes
    assert as_bytes == as_numbers


def test_cache_groups_of_a_hybrid_model_are_different_blocks():
    groups = [decode_batch(encode([1.0, [vllm_stored(group_idx=group)]])).changes[0] for group in (None, 0, 1, 2)]
    assert groups[0] == groups[1] and len({tuple(change.hashes) for change in groups}) == 3
    removed = decode_batch(encode([1.0, [{"type": "BlockRemoved", "block_hashes": [5], "group_idx": 1}]])).changes[0]
    assert removed.hashes[0] == groups[2].hashes[1]


def test_blocks_that_leave_one_by_one_are_one_change():
    leaving = [{"type": "BlockRemoved", "block_hashes": [n], "medium": "GPU"} for n in range(5)]
    changes = decode_batch(encode([1.0, [*leaving, vllm_stored(), leaving[0]]])).changes
    assert [change.kind for change in changes] == ["removed", "stored", "removed"]
    assert changes[0].hashes == [0, 1, 2, 3, 4]


def test_unknown_events_are_counted_and_the_others_are_taken():
    events = [{"type": "BlockMoved", "x": 1}, vllm_stored(), ["BlockMoved", 1], {"type": "L" * 1000}]
    batch = decode_batch(encode([1.0, events]))
    assert batch.unknown == {"BlockMoved": 2, "L" * 64: 1} and len(batch.changes) == 1


def test_no_token_id_becomes_an_object():
    payload = encode([1.0, [vllm_stored(), ["BlockStored", [1], None, [TOKEN] * 16, 16, None, "GPU"]]])
    batch = decode_batch(payload)
    assert TOKEN not in gc.get_referents(*batch.changes) and str(TOKEN) not in repr(batch)
    assert "poet" not in repr(batch)


@pytest.mark.parametrize("payload", [
    b"", b"GET / HTTP/1.1\r\n", encode({"ts": 1}), encode([1, 2]), encode(["now", []]), encode([1.0, [1]]),
    encode([1.0, [{}]]), encode([1.0, [[]]]), encode([1.0, [["BlockStored"]]]), encode([1.0, [{"type": 5}]]),
    encode([1.0, [vllm_stored(block_hashes="x")]]), encode([1.0, [vllm_stored(block_size=0)]]), b"\x91" * 100_000,
])  # fmt: skip
def test_garbage_is_one_error(payload):
    with pytest.raises(MalformedBatch, match="no batch of KV events"):
        decode_batch(payload)


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 10**6))
def test_damaged_messages_are_that_error_or_events(noise, seed):
    dice = random.Random(seed)
    payload = bytearray(encode([1.0, [vllm_stored(), sglang_stored(), ["BlockRemoved", [1], "GPU"]], 0]))
    for byte in noise:
        payload[dice.randrange(len(payload))] = byte
    for damaged in (bytes(payload), bytes(payload[: dice.randrange(len(payload))]), bytes(noise)):
        try:
            changes = decode_batch(damaged).changes
        except MalformedBatch:
            continue
        found = PoolHistory()
        for change in changes:
            found.apply(change)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_clock_that_says_nothing_is_left_out(seconds):
    assert decode_batch(encode([seconds, []])).seconds is None
