"""The torch reference attends as the definition says, for ragged batches over shuffled blocks."""

import math
import random

import pytest
import torch

from sojourn.engine.compute.attention.backend import AttentionSpec
from sojourn.engine.compute.attention.torch_backend import TorchAttention
from sojourn.engine.compute.kv_cache import LayerCache
from sojourn.engine.compute.operations.backend import Operations
from sojourn.engine.token.models.mpt import alibi_slopes
from tests.engine.compute.attention_inputs import attention_inputs, by_head

BLOCK = 4


def seen_keys(position: int, spec: AttentionSpec) -> list[int]:
    """Positions of the keys that a query sees."""
    window = spec.window or position + 1
    return [key for key in range(position + 1) if key < spec.sink_tokens or key > position - window]


def hide_unseen_blocks(cache: torch.Tensor, items, tables, spec: AttentionSpec, size: int) -> torch.Tensor:
    """A copy [planes, num_slots, ...] with NaN in all blocks of which no query sees a key."""
    hidden = torch.full_like(cache, math.nan)
    for (past, new), table in zip(items, tables, strict=True):
        for column in {key // size for i in range(new) for key in seen_keys(past + i, spec)}:
            slots = slice(int(table[column]) * size, (int(table[column]) + 1) * size)
            hidden[:, slots] = cache[:, slots]
    return hidden


def by_definition(query, keys, values, past: int, spec: AttentionSpec) -> torch.Tensor:
    """One sequence, one head and one query after another. query [new, heads, dim]; keys and values [context, kv_heads,
    dim]. float64."""
    output = query.new_empty(*query.shape[:2], spec.value_dim)
    group = query.shape[1] // keys.shape[1]
    for i in range(len(query)):
        position = past + i
        seen = seen_keys(position, spec)
        for head in range(query.shape[1]):
            slope = 0 if spec.alibi_slopes is None else spec.alibi_slopes[head]
            scores = torch.stack([query[i, head] @ keys[j, head // group] * spec.scale for j in seen])
            if spec.soft_cap is not None:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            scores = scores - slope * torch.tensor([position - j for j in seen])
            if spec.sink_logits is not None:
                scores = torch.cat((scores, spec.sink_logits[head : head + 1]))
            weights = scores.softmax(0)[: len(seen)]
            output[i, head] = weights @ values[seen, head // group, : spec.value_dim]
    return output


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "alibi", "latent", "soft_cap", "sinks", "sink_tokens"),
    [
        (4, 4, None, False, False, None, False, 0),
        (4, 2, None, False, False, None, False, 0),
        (4, 1, 5, False, False, None, False, 0),
        (6, 2, 1, False, False, None, False, 0),
        (4, 2, 8, True, False, None, False, 0),
        (6, 6, None, True, False, None, False, 0),
        (4, 1, None, False, True, None, False, 0),
        (4, 1, 3, False, True, None, False, 0),
        (4, 2, 5, False, False, 0.9, False, 0),
        (4, 2, None, False, False, None, True, 0),
        (6, 2, 7, True, False, 2.0, True, 0),
        (4, 2, 5, False, False, None, False, 3),
        (4, 2, 4, True, False, None, False, 4),
        (4, 1, 9, False, True, None, False, 6),
        (4, 1, 2, False, False, None, True, 12),
        (4, 2, 300, False, False, None, False, 4),
    ],
)
def test_attention_equals_its_definition(heads, kv_heads, window, alibi, latent, soft_cap, sinks, sink_tokens):
    dice = random.Random(0)
    torch.manual_seed(0)
    dim, value_dim = 8, 6 if latent else 8
    slopes = alibi_slopes(heads) if alibi else None
    sink_logits = torch.linspace(-2, 3, heads, dtype=torch.float64) if sinks else None
    spec = AttentionSpec(1 / math.sqrt(dim), value_dim, window, slopes, soft_cap, sink_logits, sink_tokens)
    items = [(0, 1), (3, 1), (7, 1), (200, 1), (0, 2), (0, 9), (4, 5), (13, 11)]  # past and new tokens
    ids = list(range(1, 200))
    dice.shuffle(ids)
    tables = [[ids.pop() for _ in range(-(-(past + new) // BLOCK))] for past, new in items]
    cache = torch.randn(1 if latent else 2, 200 * BLOCK, kv_heads, dim, dtype=torch.float64)
    slots = [[table[p // BLOCK] * BLOCK + p % BLOCK for p in range(sum(item))] for table, item in
             zip(tables, items, strict=True)]  # fmt: skip
    written = [slot for places, (past, _) in zip(slots, items, strict=True) for slot in places[past:]]
    width = max(map(len, tables))
    inputs = attention_inputs(
        [new for _, new in items],
        [past + new for past, new in items],
        torch.tensor(written),
        torch.tensor([table + [0] * (width - len(table)) for table in tables]),
        BLOCK,
    )
    query = torch.randn(len(written), heads, dim, dtype=torch.float64)
    key = torch.randn(len(written), kv_heads, dim, dtype=torch.float64)
    value = None if latent else torch.randn(len(written), kv_heads, dim, dtype=torch.float64)
    backend = TorchAttention()
    backend.begin(inputs)
    layer_cache = LayerCache(cache.unflatten(1, (-1, BLOCK)))
    Operations().write(key, value, inputs.slots, layer_cache)
    output = backend.attend(query, layer_cache, spec)
    assert torch.equal(output, backend.attend(query, LayerCache(by_head(cache, BLOCK)), spec)), "in any order of heads"
    hidden = LayerCache(by_head(hide_unseen_blocks(cache, items, tables, spec, BLOCK), BLOCK))
    assert torch.equal(output, backend.attend(query, hidden, spec)), "blocks that no query sees are another sequence's"
    assert output.shape == (len(written), heads, value_dim)
    begin = 0
    for places, (past, new) in zip(slots, items, strict=True):
        rows = slice(begin, begin + new)
        assert torch.equal(cache[0, places[past:]], key[rows])
        expected = by_definition(query[rows], cache[0, places], cache[-1, places], past, spec)
        torch.testing.assert_close(output[rows], expected, rtol=1e-6, atol=1e-6)  # slopes are float32
        begin += new
