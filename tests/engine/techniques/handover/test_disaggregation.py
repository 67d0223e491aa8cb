"""A prefill and a decode engine in one process, over shared memory: the tokens of one engine, whatever goes wrong."""

import threading
import time

import pytest
import zmq
from msgspec.structs import replace

from sojourn.engine.messages import Submit
from sojourn.metrics.ledger import Account
from tests.engine.harness import drain, hand_over, handoffs_of, make_engine, submit
from tests.engine.memory.audits import audit_tiers

LENGTHS = (90, 33, 34, 5)
PROMPTS = [[(7 * index + 3 * at) % 290 for at in range(length)] for index, length in enumerate(LENGTHS)]
ONE_MIB = {"kv_host_gib": 1e-3}


class Split:
    """Two engines, and what a proxy does with each request."""

    def __init__(self, folder, prefill=None, decode=None, decode_folder=None):
        self.prefill, self.first = make_engine(folder, kv_role="prefill", **ONE_MIB | (prefill or {}))
        self.decode, self.second = make_engine(decode_folder or folder, kv_role="decode", **ONE_MIB | (decode or {}))

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def compute(self, requests: list[Submit]) -> list[Submit]:
        """The prefill server's part. What the decode server gets."""
        prompts = [replace(each, hands_over=True, sampling=replace(each.sampling, max_tokens=1)) for each in requests]
        hand_over(self.prefill, prompts)
        drain(self.prefill, check=True)
        return [replace(each, kv_source=self.first.ended[each.request_id].kv_source) for each in requests]

    def generate(self, requests: list[Submit]) -> list[list[int]]:
        hand_over(self.decode, requests)
        while self.decode.is_preparing:  # else the first ones could be over before the others are read
            time.sleep(0.001)
            hand_over(self.decode, [])
        drain(self.decode, check=True)
        audit_tiers(self.prefill.scheduler.technique("tiers").tiers)
        audit_tiers(self.decode.scheduler.technique("tiers").tiers)
        return [self.second.tokens.get(each.request_id, []) for each in requests]

    def serve(self, requests: list[Submit]) -> list[list[int]]:
        return self.generate(self.compute(requests))


@pytest.fixture
def split(checkpoints):
    opened: list[Split] = []

    def make(*args, **settings) -> Split:
        opened.append(Split(*(args or (checkpoints["llama"],)), **settings))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def requests(prompts=PROMPTS, max_tokens: int = 8) -> list[Submit]:
    return [submit(f"r{index}", prompt, max_tokens) for index, prompt in enumerate(prompts)]


def alone(folder, prompts=PROMPTS, **settings) -> list[list[int]]:
    engine, published = make_engine(folder, **settings)
    hand_over(engine, requests(prompts))
    drain(engine)
    return [published.tokens[f"r{index}"] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def expected(checkpoints):
    return alone(checkpoints["llama"])


def test_tokens_are_those_of_one_server_and_the_prompt_is_not_computed_twice(split, expected):
    pair = split()
    assert pair.serve(requests()) == expected
    ended = pair.second.ended["r0"]
    assert ended.prefix.prefix_outcomes == {"hit_peer": 80, "miss_cold": 10} and ended.computed_tokens == 10 + 7
    assert ended.kv_load.transfer_bytes == 5 * pair.decode.scheduler.technique("tiers").tiers.block_bytes
    assert ended.kv_load.transfer_ns > 0 and ended.ledger[Account.MEMORY_TRANSFER] > 0
    assert len(pair.first.ended["r0"].kv_source.slots) == 5
    assert len(handoffs_of(pair.prefill).leases) == 0, "what was read was given back"
    # A longer prompt with the same beginning: both sides have that, and only the rest is read.
    longer = [submit("longer", [*PROMPTS[0], *range(40)], 8)]
    (tokens,) = pair.serve(longer)
    assert len(tokens) == 8 and pair.second.ended["longer"].kv_load.loaded_tokens == {"peer": 48}
    assert pair.first.ended["longer"].cached_tokens == 80


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({"num_kv_blocks": 40, "max_num_batched_tokens": 24}, {"num_kv_blocks": 300}),  # chunks; other pools
        ({"num_kv_blocks": 12, "max_num_seqs": 2}, {"num_kv_blocks": 9, "max_num_seqs": 4}),  # preemptions
        ({"overlap": "on"}, {"overlap": "on", "max_num_batched_tokens": 16}),
        ({"kv_host_gib": 4e-5}, {"kv_host_gib": 6e-5}),  # slots for some blocks only
    ],
    ids=["chunked", "preempted", "overlap", "short-of-slots"],
)
def test_tokens_stay_the_same_with_other_pools_chunks_and_preemptions(split, expected, prefill, decode):
    limits = {"max_model_len": 128}
    pair = split(prefill=prefill | limits, decode=decode | limits)
    tokens = pair.serve(requests(max_tokens=32))
    assert [each[:8] for each in tokens] == expected
    loads = [ended.kv_load.loaded_tokens for ended in pair.second.ended.values() if ended.kv_load is not None]
    assert any("peer" in tokens for tokens in loads)
    if prefill.get("max_num_seqs") == 2:
        assert any(ended.preemptions for ended in pair.second.ended.values()), "the case did not come up"


@pytest.mark.parametrize(("family", "kv_cache_dtype"), [("llama", "int8"), ("deepseek-v3", "auto")])
def test_codes_and_latents_arrive_whole(split, checkpoints, family, kv_cache_dtype):
    settings = {"kv_cache_dtype": kv_cache_dtype}
    pair = split(checkpoints[family], prefill=settings, decode=settings)
    assert pair.serve(requests(PROMPTS[:2])) == alone(checkpoints[family], PROMPTS[:2], **settings)
    assert pair.second.ended["r0"].kv_load.loaded_tokens == {"peer": 80}


@pytest.mark.parametrize(
    ("decode", "other", "words"),
    [
        ({"block_size": 8}, None, "block_size is 16 there and 8 here"),
        ({}, "qwen2", "model is llama there and qwen2 here"),
    ],
)
def test_blocks_of_another_model_are_refused_with_a_sentence(split, checkpoints, decode, other, words):
    pair = split(decode=decode, decode_folder=checkpoints[other] if other else None)
    pair.serve(requests(PROMPTS[:1]))
    ended = pair.second.ended["r0"]
    assert ended.reason == "error" and ended.is_peer_error and words in ended.error


@pytest.mark.parametrize("strict", [True, False])
def test_a_lease_that_is_over_costs_an_error_or_a_local_prefill(split, expected, strict):
    pair = split(prefill={"kv_lease_seconds": 0.5}, decode={"kv_transfer_failure": "error" if strict else "recompute"})
    proxied = pair.compute(requests())
    assert len(handoffs_of(pair.prefill).leases) == 3
    handoffs_of(pair.prefill).end_leases(2**62)
    assert not len(handoffs_of(pair.prefill).leases)
    tokens, ended = pair.generate(proxied), pair.second.ended["r0"]
    if strict:
        assert ended.reason == "error" and "does not hold them any more" in ended.error
        assert tokens[3] == expected[3], "a prompt without a full block needs no peer"
    else:
        assert tokens == expected and not ended.kv_load.loaded_tokens


@pytest.mark.parametrize("answer", [b"", b"\x81\xa1x", b"\xc1" * 9, None], ids=["empty", "map", "garbage", "silence"])
def test_a_peer_that_speaks_garbage_gets_a_sentence(split, expected, answer, monkeypatch):
    monkeypatch.setattr("sojourn.engine.techniques.handover.connection.ANSWER_MS", 200)
    pair = split(decode={"kv_transfer_failure": "error"})
    context = zmq.Context()
    channel = context.socket(zmq.ROUTER)
    port = channel.bind_to_random_port("tcp://127.0.0.1")

    def speak() -> None:
        sender, _ = channel.recv_multipart()
        if answer is not None:
            channel.send_multipart([sender, answer])

    threading.Thread(target=speak, daemon=True).start()
    (proxied,) = pair.compute(requests(PROMPTS[:1]))
    pair.generate([replace(proxied, kv_source=replace(proxied.kv_source, port=port))])
    error = pair.second.ended["r0"].error
    assert f"the prefill server 127.0.0.1:{port} could not be read" in error
    assert ("no answer" if answer is None else "none of this protocol") in error
    context.destroy(linger=0)


def test_strangers_at_the_side_channel_change_nothing(split, expected):
    pair = split()
    proxied = pair.compute(requests())
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(f"tcp://127.0.0.1:{handoffs_of(pair.prefill).address.port}")
    for message in (b"", b"\xc1", b"\x82", b"x" * 10_000):
        stranger.send(message)
    stranger.send_multipart([b"a", b"b", b"c"])
    assert pair.generate(proxied) == expected
    assert pair.second.ended["r0"].kv_load.loaded_tokens == {"peer": 80}
    context.destroy(linger=0)
