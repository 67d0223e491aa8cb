"""A prefill and a decode engine in one process, over shared memory: the tokens of one engine, whatever goes wrong."""

import pytest
from msgspec.structs import replace

from engine.messages import Submit
from metrics.ledger import Account
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.memory.audits import audit_tiers

PROMPTS = [
    [(7 * index + 3 * position) % 290 for position in range(length)] for index, length in enumerate((90, 33, 16, 5))
]
ONE_MIB = {"kv_host_gib": 1e-3}


class Split:
    """Two engines, and what a proxy does with each request."""

    def __init__(self, folder, prefill=None, decode=None):
        self.prefill, self.first = make_engine(folder, kv_role="prefill", **ONE_MIB | (prefill or {}))
        self.decode, self.second = make_engine(folder, kv_role="decode", **ONE_MIB | (decode or {}))

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()

    def compute(self, requests: list[Submit]) -> list[Submit]:
        """The prefill server's part. What the decode server gets."""
        prompts = [replace(each, hands_over=True, sampling=replace(each.sampling, max_tokens=1)) for each in requests]
        hand_over(self.prefill, prompts)
        drain(self.prefill, check=True)
        return [replace(each, kv_source=self.first.ended[each.request_id].kv_source) for each in requests]

    def serve(self, requests: list[Submit]) -> list[list[int]]:
        hand_over(self.decode, self.compute(requests))
        drain(self.decode, check=True)
        audit_tiers(self.prefill.scheduler.tiers)
        audit_tiers(self.decode.scheduler.tiers)
        return [self.second.tokens[each.request_id] for each in requests]


def requests(prompts=PROMPTS, max_tokens: int = 8) -> list[Submit]:
    return [submit(f"r{index}", prompt, max_tokens) for index, prompt in enumerate(prompts)]


def expected(folder, **settings) -> list[list[int]]:
    engine, published = make_engine(folder, **settings)
    hand_over(engine, requests())
    drain(engine)
    return [published.tokens[f"r{index}"] for index in range(len(PROMPTS))]


@pytest.fixture
def split(checkpoints):
    split = Split(checkpoints["llama"])
    yield split
    split.close()


def test_tokens_are_those_of_one_server_and_the_prompt_is_not_computed_twice(checkpoints, split):
    assert split.serve(requests()) == expected(checkpoints["llama"])
    ended = split.second.ended["r0"]
    assert ended.prefix.prefix_outcomes == {"hit_peer": 80, "miss_cold": 10} and ended.computed_tokens == 10 + 7
    assert (
        ended.kv_load.transfer_bytes == 5 * split.decode.scheduler.tiers.block_bytes and ended.kv_load.transfer_ns > 0
    )
    assert ended.ledger[Account.MEMORY_TRANSFER] > 0
    assert len(split.first.ended["r0"].kv_source.slots) == 5
