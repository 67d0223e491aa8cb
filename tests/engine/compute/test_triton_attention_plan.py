"""The plan of the Triton attention kernels: each segment once, within its bounds, and where sequences are cut."""

import random

import pytest
import torch

from tests.engine.compute.triton_harness import DEVICE

pytest.importorskip("triton")

from sojourn.engine.compute.attention import triton_backend
from sojourn.engine.compute.attention.backend import AttentionSpec
from sojourn.engine.compute.attention.triton_backend import Kind, TritonAttention
from sojourn.engine.compute.triton.attention_tiles import SHORT_TOKENS, Shape, Tiles
from tests.engine.compute.attention_inputs import attention_inputs
from tests.further import further


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3)])
def test_the_plan_covers_each_segment_once_within_its_bounds(seed, monkeypatch):
    monkeypatch.setattr(triton_backend, "CHUNK", 16)
    dice = random.Random(seed)
    count = dice.choice([1, 17, 40, 60])
    new = [dice.choice([1, 1, 1, 4, 9, 70, 300]) for _ in range(count)]
    contexts = [n + dice.choice([0, 0, 5, 100, 4000, dice.randrange(9_000)]) for n in new]
    inputs = attention_inputs(
        new, contexts, torch.zeros(1), torch.zeros(count, 1, dtype=torch.int32, device=DEVICE), 16
    )
    group, kv_heads = dice.choice([(1, 8), (3, 2), (16, 1)])
    for short in (True, False):
        tiles = Tiles(dice.choice([16, 64]), 64, 4, 2, 2, 2, dice.choice([1, 4]), slack=dice.choice([1, 2]))
        window = dice.choice([0, 0, 500])
        target = dice.choice([8, 100, 1056])
        kind = Kind(short, tiles, kv_heads, group, 16, window, target, max(1, target // 4))
        backend = TritonAttention(DEVICE, num_multiprocessors=1)
        backend.begin(inputs)
        room, num_items = backend._make_room(kind), backend._num_items(kind)
        room.items.fill_(-7)
        backend._plan(kind, room, num_items)
        items = [row for row in room.items[:num_items].tolist() if row[0] >= 0]
        wanted = {(s, b) for s, n in enumerate(new) if (n <= SHORT_TOKENS) == short for b in range(kind.num_blocks(n))}
        assert {(s, b) for s, b, *_ in items} == wanted
        cut = {}
        for sequence, block, segment, segments, partial in items:
            if segments > 1:
                cut.setdefault((sequence, block, segments), {})[segment] = partial + segment
            else:
                assert segment == 0
        assert len(items) == len(wanted) - len(cut) + sum(segments for _, _, segments in cut)
        places = [place for segments in cut.values() for place in segments.values()]
        assert len(places) == len(set(places)) and max(places, default=-1) < len(room.arrivals) // kv_heads
        assert all(sorted(parts) == list(range(segments)) for (_, _, segments), parts in cut.items())
        assert len(items) <= num_items
        if window:
            assert max((segments for _, _, segments in cut), default=1) <= (window + tiles.block_m) // tiles.block_n + 2


def planned_segments(count: int, past: int, places: int) -> set[int]:
    """Segments that `count` decodes of equal length are cut into, where `places` programs run at once."""
    inputs = attention_inputs(
        [1] * count, [past + 1] * count, torch.zeros(1), torch.zeros(count, 1, dtype=torch.int32, device=DEVICE), 16
    )
    backend = TritonAttention(DEVICE, num_multiprocessors=1)
    backend.begin(inputs)
    tiles = Tiles(16, 64, 4, 3, resident=places, waves=4, least_tiles=2)
    kind = backend._kind(True, tiles, Shape(2, 16, 16, 4, 4), 1, AttentionSpec(16**-0.5, 16, None, None))
    room, num_items = backend._make_room(kind), backend._num_items(kind)
    backend._plan(kind, room, num_items)
    return {row[3] for row in room.items[:num_items].tolist() if row[0] >= 0}


def test_equal_sequences_are_cut_where_their_last_wave_would_run_nearly_empty():
    assert planned_segments(8, 4095, 8) == {4}, "32 programs, four waves"
    assert planned_segments(40, 4095, 8) == {1}, "five full waves"
    assert planned_segments(41, 4095, 8) != {1}, "a sixth wave of one"
    assert planned_segments(41, 63, 8) == {1}, "nothing to cut"
