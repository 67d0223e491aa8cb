"""The Triton attention kernels give what the torch reference gives, whatever the batch is made of."""

import random
from dataclasses import dataclass

import pytest
import torch

from tests.engine.triton_harness import DEVICE

pytest.importorskip("triton")

from engine.compute.attention import AttentionSpec, LayerCache, attention_inputs
from engine.compute.attention_torch import TorchAttention
from engine.compute.attention_triton import TritonAttention
from engine.compute.triton.attention_tiles import Tiles
from engine.token.models.mpt import alibi_slopes

SMALL = Tiles(16, 16, 4, 2, resident=1, waves=1, least_tiles=1, slack=1, two_loops=False)
MIXED = [(20, 1), (0, 1), (37, 1), (0, 9), (21, 11), (40, 4)]  # past and new tokens: decodes, prompts, a verification


@dataclass(frozen=True)
class Case:
    """A batch over shuffled blocks, and how a layer attends to it."""

    items: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 16
    value_dim: int | None = None  # latent: fewer than head_dim
    window: int | None = None
    sloped: bool = False
    block_size: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> AttentionSpec:
        slopes = tuple(alibi_slopes(self.heads)) if self.sloped else None
        return AttentionSpec(self.head_dim**-0.5, self.value_dim or self.head_dim, self.window, slopes)

    def build(self, seed: int = 0):
        """Inputs, queries and a cache, of which slots that no sequence owns hold NaN."""
        dice, size = random.Random(seed), self.block_size
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-(past + new) // size) for past, new in self.items]
        ids = list(range(sum(counts) + 3))
        dice.shuffle(ids)
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        width = max(counts)
        num_slots = (sum(counts) + 3) * size
        planes = 1 if self.value_dim else 2
        cache = torch.randn(planes, num_slots, self.kv_heads, self.head_dim, generator=generator)
        query = torch.randn(sum(new for _, new in self.items), self.heads, self.head_dim, generator=generator)
        inputs = attention_inputs(
            [new for _, new in self.items],
            [past + new for past, new in self.items],
            torch.zeros(len(query), dtype=torch.int64, device=DEVICE),
            torch.tensor([table + table[:1] * (width - len(table)) for table in tables], device=DEVICE),
            size,
        )
        return inputs, query.to(DEVICE, self.dtype), cache.to(DEVICE, self.dtype)


def expected(case: Case, inputs, query, cache) -> torch.Tensor:
    """The reference's, in float32."""
    reference = TorchAttention()
    reference.begin(inputs)
    return reference.attend(query.float(), LayerCache(cache.float()), case.spec)


def attended(case: Case, inputs, query, cache, tiles: Tiles | None = SMALL, num_multiprocessors: int = 4):
    backend = TritonAttention(DEVICE, num_multiprocessors=num_multiprocessors, short=tiles, long=tiles)
    backend.begin(inputs)
    return backend.attend(query, LayerCache(cache), case.spec)


def check(case: Case, tiles: Tiles | None = SMALL, num_multiprocessors: int = 4) -> None:
    built = case.build()
    error = 1e-5 if case.dtype == torch.float32 else 2e-2
    got = attended(case, *built, tiles, num_multiprocessors)
    torch.testing.assert_close(got.float(), expected(case, *built), rtol=error, atol=error)


def order(items):
    return tuple(sorted(items, key=lambda item: item[1] > 1))


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_a_mixed_batch_with_grouped_queries_equals_the_reference(group):
    check(Case(order(MIXED), heads=group * 2, kv_heads=2))
