"""The memory plan: what a core will take is known before it takes it, and a KV pool takes memory as it fills."""

import json
import types

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sojourn.engine.compute.kv_cache import zeros
from sojourn.engine.compute.kv_formats import KV_FP8
from sojourn.engine.config import EngineConfig, model_folder
from sojourn.engine.process import free_memory_bytes
from sojourn.engine.runner.memory_plan import CUDA_SHARE, HOST_SHARE, LARGEST_HOST_SHARE, planned, pool_blocks
from sojourn.engine.token.models.registry import load_model, outlined_model
from sojourn.metrics.errors import ModelError
from sojourn.metrics.memory.plan import GIB

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MIB = 1 << 20
BLOCK_BYTES = 16 * 1024


def config(**settings) -> EngineConfig:
    return EngineConfig(model="tiny-model", **settings)


def blocks(settings: dict, free: int, device: torch.device = CPU, max_model_len: int = 1600) -> int:
    """Blocks of a model whose block of 16 tokens takes 16 KiB; 100 blocks hold its longest request."""
    return pool_blocks(config(**settings), max_model_len, 1024, free, device)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma", "mixtral", "deepseek-v3", "mpt"])
@pytest.mark.parametrize("weights", ["auto", "float32", None])
def test_weights_take_what_the_plan_says(family, weights, checkpoints):
    """But for panels that are filled up with zeros; here they are a large part, so that the width is what is tested."""
    outline = outlined_model(checkpoints[family], torch.float32, CPU, None, weights=weights)
    expected = outline.weight_bytes
    model = load_model(checkpoints[family], torch.float32, CPU, None, weights=weights)
    assert expected <= model.weight_bytes <= 1.6 * expected
    assert outline.model.num_parameters == model.num_parameters
    if weights is None:
        assert expected == model.weight_bytes


def test_tiny_model_takes_what_the_plan_says():
    plan = planned(config(), model_folder("tiny-model"))
    assert plan.weight_bytes == 13_511_680
    assert plan.num_kv_blocks == 64 * 4096 // 16
    assert plan.kv_bytes == 64 * 4096 * 4 * 2 * 2 * 64 * 4
    assert plan.total_bytes == sum(plan.parts.values()) < plan.free_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, KV_FP8])
def test_a_kv_cache_takes_memory_only_where_it_is_written(dtype):
    process = psutil.Process()
    before = process.memory_info().rss
    cache = zeros((8, 64 * MIB // dtype.itemsize), dtype, CPU)
    assert cache.nbytes == 512 * MIB
    assert process.memory_info().rss - before < 16 * MIB
    cache.view(torch.uint8)[0] = 1
    assert 60 * MIB < process.memory_info().rss - before < 80 * MIB
    assert not cache.view(torch.uint8)[1:, ::4096].any(), "the rest reads as zeros"


def test_pool_is_what_all_sequences_can_use_or_a_share_of_the_memory():
    enough = 64 * 100 * BLOCK_BYTES
    assert blocks({}, int(enough / HOST_SHARE) + BLOCK_BYTES) == 6400
    assert blocks({}, int(enough / HOST_SHARE) - 2 * BLOCK_BYTES) < 6400
    assert blocks({"max_num_seqs": 2}, 100 * GIB) == 200
    assert blocks({}, int(enough / CUDA_SHARE) + BLOCK_BYTES, CUDA) == 6400
    assert blocks({"memory_fraction": 0.5}, 400 * BLOCK_BYTES) == 200


def test_a_host_gives_more_than_its_share_to_one_long_request_and_no_more():
    assert blocks({}, 400 * BLOCK_BYTES) == 100
    assert blocks({}, 399 * BLOCK_BYTES) == 100  # a quarter holds 99
    least = int(100 / LARGEST_HOST_SHARE) + 1
    assert blocks({}, least * BLOCK_BYTES) == 100
    with pytest.raises(ModelError, match="room for 99 KV blocks, but one request of max_model_len 1600 needs 100"):
        blocks({}, (least - 1) * BLOCK_BYTES)
    with pytest.raises(ModelError, match="memory_fraction"):
        blocks({"memory_fraction": 0.25}, 399 * BLOCK_BYTES)  # the user's own share is not exceeded


def test_a_pool_in_gib_is_that_large():
    assert blocks({"kv_cache_gib": 1}, 0) == GIB // BLOCK_BYTES
    assert blocks({"kv_cache_gib": BLOCK_BYTES / GIB}, 0) == 1
    with pytest.raises(ModelError, match="holds no block"):
        blocks({"kv_cache_gib": (BLOCK_BYTES - 1) / GIB}, 0)


@given(free=st.integers(0, 1 << 45), seqs=st.integers(1, 512), longest=st.integers(2, 100_000), cuda=st.booleans())
def test_a_default_pool_never_exceeds_its_share_nor_what_can_be_used(free, seqs, longest, cuda):
    try:
        count = pool_blocks(config(max_num_seqs=seqs), longest, 1024, free, CUDA if cuda else CPU)
    except ModelError:
        assert -(-longest // 16) * BLOCK_BYTES > free * (CUDA_SHARE if cuda else LARGEST_HOST_SHARE) - BLOCK_BYTES
        return
    least = -(-longest // 16)
    assert least <= count <= seqs * least
    assert count * BLOCK_BYTES <= free * (CUDA_SHARE if cuda else LARGEST_HOST_SHARE)
    assert cuda or count == least or count * BLOCK_BYTES <= free * HOST_SHARE


def test_a_model_that_does_not_fit_is_refused_before_anything_is_built(tmp_path, monkeypatch):
    sizes = json.loads((model_folder("tiny-model") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"hidden_size": 8192, "intermediate_size": 1 << 20}))
    monkeypatch.setattr("psutil.virtual_memory", lambda: types.SimpleNamespace(available=4 * GIB))
    with pytest.raises(ModelError, match=r"the model does not fit \(memory: .*weights \d+\.\d GiB"):
        planned(config(load_format="dummy"), tmp_path)


def test_a_container_bounds_the_memory(tmp_path):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    available = psutil.virtual_memory().available

    def limit(folder, maximum: str, current: int, reclaimable: int) -> None:
        (folder / "memory.max").write_text(f"{maximum}\n")
        (folder / "memory.current").write_text(f"{current}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {reclaimable}\n")

    limit(inner, "max", 5 * MIB, 0)
    assert free_memory_bytes(tmp_path, own) > 0.5 * available
    limit(inner.parent, str(100 * MIB), 80 * MIB, 30 * MIB)  # of the group above
    assert free_memory_bytes(tmp_path, own) == 50 * MIB
    limit(inner, str(10 * MIB), 20 * MIB, 0)
    assert free_memory_bytes(tmp_path, own) == 0
    assert free_memory_bytes(tmp_path, tmp_path / "none") > 0.5 * available
