"""Expanded latents give what absorbed ones give, and a sequence expands where that costs less FLOPs."""

import pytest
import torch

from sojourn.engine.compute.attention.cpp_backend import CppAttention
from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.cpp.extension import library
from sojourn.engine.compute.kv_cache import allocate
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.token.models import expansion, latent
from sojourn.engine.token.models.registry import load_model
from sojourn.metrics.compute.cost_model import Expansion, expansion_savings
from tests.engine.compute.attention_inputs import attention_inputs
from tests.engine.compute.triton_harness import DEVICE

pytest.importorskip("triton")

from sojourn.engine.compute.attention.triton_backend import TritonAttention
from sojourn.engine.compute.triton.attention_tiles import Tiles

BLOCK = 16
CPU = torch.device("cpu")
STEP = [(1, 40), (1, 0), (3, 30), (150, 0), (40, 25), (2, 61), (30, 0)]  # new and past tokens
SMALL = Tiles(16, 16, 4, 2, resident=1, waves=1, least_tiles=1)


def hidden(model, attention, sequences=STEP, kv_dtype=torch.float32, device=CPU) -> torch.Tensor:
    """Of a step over a cache of noise, whose blocks are shuffled."""
    width = max(-(-(new + past) // BLOCK) for new, past in sequences)
    dice = torch.Generator().manual_seed(0)
    tables = torch.randperm(len(sequences) * width, generator=dice).view(len(sequences), width)
    at = [torch.arange(past, past + new) for new, past in sequences]
    slots = torch.cat([table[p // BLOCK] * BLOCK + p % BLOCK for table, p in zip(tables, at, strict=True)]).to(device)
    cache = allocate(model.kv_layout, len(model.layers), tables.numel(), BLOCK, kv_dtype, device)
    shape, operations = cache.values.shape[3:], Operations()
    for layer in cache.layers():
        noise = torch.randn(tables.numel() * BLOCK, shape[1], model.kv_layout.head_dim, generator=dice).to(device)
        operations.write(noise, None, torch.arange(len(noise), device=device), layer)
    contexts = [new + past for new, past in sequences]
    attention.begin(attention_inputs([new for new, _ in sequences], contexts, slots, tables.to(device), BLOCK))
    positions = torch.cat(at).to(device)
    with torch.inference_mode():
        return model(positions % 300 + 3, positions, slots, operations, attention, cache)


@pytest.fixture
def expanded(monkeypatch):
    """Counts the sequences that are expanded; `never` makes that none."""
    counts = []
    attend = latent.LatentAttention._expanded

    def counted(self, part, *others):
        counts.append(len(part.expanded))
        return attend(self, part, *others)

    monkeypatch.setattr(latent.LatentAttention, "_expanded", counted)
    counts_of = {"counts": counts}
    counts_of["never"] = lambda: monkeypatch.setattr(latent.LatentAttention, "expansion", lambda *_: None)
    return counts_of


def backends() -> dict:
    found = {"torch": TorchAttention}
    if (kernels := library()) is not None:
        found["cpp"] = lambda: CppAttention(kernels)
    return found


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("family", ["deepseek-v2-lite", "deepseek-v3"])
def test_a_step_with_expanded_sequences_gives_what_an_absorbed_one_gives(
    family, backend, kv_dtype, checkpoints, expanded
):
    model = load_model(checkpoints[family], torch.float32, CPU, None)
    make = backends()[backend]
    found = hidden(model, make(), kv_dtype=kv_dtype)
    assert expanded["counts"] == [3] * len(model.layers)  # two prompts, and a chunk behind 25 tokens
    expanded["never"]()
    torch.testing.assert_close(found, hidden(model, make(), kv_dtype=kv_dtype), rtol=2e-4, atol=2e-4)
    assert len(expanded["counts"]) == len(model.layers)


def test_sequences_that_do_not_fit_into_the_room_together_take_turns(checkpoints, expanded, monkeypatch):
    model = load_model(checkpoints["deepseek-v3"], torch.float32, CPU, None)
    together = hidden(model, TorchAttention())
    heads, head_dim = 4, 20
    monkeypatch.setattr(latent, "ROOM_BYTES", 160 * 2 * heads * head_dim * 4)
    torch.testing.assert_close(hidden(model, TorchAttention()), together, rtol=1e-5, atol=1e-5)
    assert expanded["counts"] == [3] * len(model.layers) + [1, 2] * len(model.layers)
    monkeypatch.setattr(latent, "ROOM_BYTES", 100 * 2 * heads * head_dim * 4)  # 150 tokens do not fit
    torch.testing.assert_close(hidden(model, TorchAttention()), together, rtol=2e-4, atol=2e-4)
    assert expanded["counts"][-len(model.layers) :] == [2] * len(model.layers)


def test_triton_attends_to_expanded_latents(checkpoints, expanded):
    model = load_model(checkpoints["deepseek-v2-lite"], torch.float32, DEVICE, None)
    sequences = [(1, 20), (3, 30), (20, 0)]
    backend = TritonAttention(DEVICE, num_multiprocessors=4, short=SMALL, long=SMALL)
    found = hidden(model, backend, sequences, device=DEVICE)
    assert expanded["counts"] == [1] * len(model.layers)
    torch.testing.assert_close(found, hidden(model, TorchAttention(), sequences, device=DEVICE), rtol=1e-4, atol=1e-4)


def test_a_step_of_decodes_is_not_split(checkpoints, expanded):
    model = load_model(checkpoints["deepseek-v3"], torch.float32, CPU, None)
    hidden(model, TorchAttention(), [(1, 40), (1, 7)])
    assert expanded["counts"] == []


def test_a_chunk_is_expanded_from_the_length_on_that_pays_for_the_past():
    """DeepSeek-V2-Lite: 2 * 512 - 256 products a pair and head are saved, 256 * 512 a past position are spent."""
    lite = Expansion(2 * 16 * 768, 2 * 16 * 256 * 512, most_context=10_000)
    assert expansion_savings(lite, 2, 0) > 0 > expansion_savings(lite, 1, 0)
    for past in (100, 1000, 9000):
        cheapest = next(new for new in range(2, 1000) if expansion_savings(lite, new, past) > 0)
        assert 16 * (cheapest * past + cheapest * (cheapest + 1) // 2) * 768 > 16 * past * 256 * 512
        assert cheapest < 172
    assert expansion_savings(lite, 600, 9500) < 0, "of no room"


def test_the_room_keeps_vectors_where_tables_say():
    room = expansion.Expander(8).room(4, 3, torch.empty(0))
    vectors = torch.randn(3, 2 * expansion.BLOCK + 5, 6)
    expansion.place(room.values[1], 1, slice(6), vectors)
    back = room.values[1][1:].flatten(0, 1)[: vectors.shape[1], :, :6]
    assert torch.equal(back.transpose(0, 1), vectors)
    assert not room.values[0].any() and not room.values[1][0].any()
    room.strides()  # its blocks are dense
