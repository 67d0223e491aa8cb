"""A core that slept computes what it computed before, and gave its KV memory back meanwhile."""

import os
from pathlib import Path

import pytest
import torch

from sojourn.engine.compute.kv_cache import parts
from sojourn.engine.core import _fall_asleep, _wake
from sojourn.engine.runner.bed import Bed, storages
from sojourn.metrics.memory.prefix_outcomes import PREFIX_OUTCOMES
from tests.engine.harness import drain, hand_over, make_engine, submit
from tests.engine.memory.audits import audit_pool

PROMPTS = [[7 + index, *range(20, 60)] for index in range(3)]


def answers(engine, published, turn: int) -> list[list[int]]:
    hand_over(engine, [submit(f"{turn}-{index}", prompt) for index, prompt in enumerate(PROMPTS)])
    drain(engine, check=True)
    return [published.tokens[f"{turn}-{index}"] for index in range(len(PROMPTS))]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("gemma3", {"prefix_caching": False}),
        ("deepseek-v3", {"kv_cache_dtype": "int8"}),
        ("qwen3", {"speculation": "ngram"}),
        ("mistral", {"eviction_policy": "lfu"}),
    ],
)
def test_a_core_that_slept_gives_the_same_tokens(checkpoints, family, settings):
    engine, published = make_engine(checkpoints[family], **settings)
    bed = Bed(engine.runner)
    before = answers(engine, published, 0)
    for turn in (1, 2):
        slept = _fall_asleep(engine, bed)
        assert slept.kv_bytes > 0 == slept.weight_bytes
        pool = engine.scheduler.pool
        audit_pool(pool, [], [])
        assert pool.counts().free == pool.num_blocks, "nothing can be found that is not there"
        assert all(not part.any() for part in parts(engine.runner.eager.kv_cache))
        _wake(bed)
        assert answers(engine, published, turn) == before


def test_a_prefix_that_was_cached_is_a_miss_after_the_sleep_and_every_token_has_an_outcome(checkpoints):
    engine, published = make_engine(checkpoints["llama"])
    answers(engine, published, 0)
    _fall_asleep(engine, Bed(engine.runner))
    answers(engine, published, 1)
    reports = [published.ended[f"1-{index}"].prefix for index in range(len(PROMPTS))]
    found = [dict.fromkeys(PREFIX_OUTCOMES, 0) | report.prefix_outcomes for report in reports]
    assert [sum(outcomes.values()) for outcomes in found] == [len(prompt) for prompt in PROMPTS]
    assert all(outcomes["hit"] == 0 and outcomes["miss_evicted"] == 32 for outcomes in found), found


def test_kv_of_the_host_tier_outlives_the_sleep(checkpoints):
    engine, published = make_engine(checkpoints["llama"], kv_host_gib=0.01)
    before = answers(engine, published, 0)
    bed = Bed(engine.runner)
    _fall_asleep(engine, bed)
    _wake(bed)
    assert answers(engine, published, 1) == before
    assert all(published.ended[f"1-{index}"].cached_tokens > 0 for index in range(len(PROMPTS)))
    engine.close()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_pool_that_was_written_gives_its_memory_back(checkpoints):
    engine, _ = make_engine(checkpoints["llama"], num_kv_blocks=2048)
    cache = engine.runner.eager.kv_cache
    for part in parts(cache):
        part.fill_(1)
    before = resident_bytes()
    _fall_asleep(engine, Bed(engine.runner))
    assert before - resident_bytes() > 0.9 * cache.nbytes > 1 << 20


def test_weights_that_were_put_away_come_back_as_they_were():
    """What a GPU does, with storages of the host."""

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 6), requires_grad=False)
            self.register_buffer("table", torch.arange(5))
            self.view = self.weight[2:4]

    layer, pool = Layer(), torch.ones(64)
    layer_module = Layer.__module__
    Layer.__module__ = "sojourn.engine.pretended"
    wanted = [layer.weight.clone(), layer.table.clone(), layer.view.clone()]
    found = storages(layer)
    assert len(found) == 2, "a view has the storage of its base"
    Layer.__module__ = layer_module
    bed = Bed(None)
    assert bed.put_away([pool.untyped_storage()], list(found.values())) == (256, 8 * 6 * 4 + 5 * 8)
    assert all(storage.nbytes() == 0 for storage in (*found.values(), pool.untyped_storage()))
    bed.leave()
    assert all(torch.equal(*pair) for pair in zip([layer.weight, layer.table, layer.view], wanted, strict=True))
    assert not pool.any(), "a pool comes back empty"
