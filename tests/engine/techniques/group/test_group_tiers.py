"""KV blocks of a group in host memory: each rank keeps its part, and the tokens are those of one process."""

import random

import pytest

from sojourn.engine import LLM, SamplingParams
from tests.further import further

pytestmark = pytest.mark.server
DICE = random.Random(5)
SHARED = [DICE.randrange(300) for _ in range(120)]
# They share beginnings of unlike lengths, and come again when others have taken the pool.
PROMPTS = [SHARED[: 40 + 16 * index] + [DICE.randrange(300) for _ in range(9)] for index in range(5)]
PROMPTS += [[DICE.randrange(300) for _ in range(90)] for _ in range(4)] + PROMPTS[:4]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def served(**settings) -> tuple[list[list[int]], list]:
    """The tokens of all prompts, three at a time, and the steps."""
    steps, found = [], []
    settings = {"num_kv_blocks": 24, "max_model_len": 160, "threads": 1} | settings
    with LLM("tiny-model", on_steps=steps.extend, **settings) as llm:
        for begin in range(0, len(PROMPTS), 3):
            found += [each.token_ids for each in llm.generate(PROMPTS[begin : begin + 3], GREEDY)]
    return found, steps


@pytest.fixture(scope="module")
def expected():
    return served()[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_parallel": 2, "kv_store_policy": "evict"},
        *further({"tensor_parallel": 2}, {"tensor_parallel": 2, "overlap": "on", "kv_store_policy": "evict"},
                 {"pipeline_parallel": 2, "num_kv_blocks": 14, "max_num_seqs": 3}),
    ],
)  # fmt: skip
def test_blocks_that_come_back_from_host_memory_change_no_token(expected, settings):
    tokens, steps = served(kv_host_gib=0.02, **settings)
    assert tokens == expected
    assert sum(step.tier_loaded_bytes.get("host", 0) for step in steps) > 0, "the pool was too large for this test"
    assert sum(step.load_ns for step in steps) > 0
