"""Reuse distances from the records of requests, against caches of every size that really ran."""

import numpy as np
import pandas as pd
import pytest

from sojourn.metrics.memory.block_uses import UNKNOWN, block_uses
from tests.further import further
from tests.metrics.memory.simulated_cache import SECOND, SimulatedCache, chains

BLOCK = 16


def recorded(traffic: list[list[int]], hits: list[int], infinite: list[int]) -> pd.DataFrame:
    """One request after the other, as `requests.parquet` has them. Each prompt ends with a token of its own."""
    rows = []
    for number, chain in enumerate(traffic):
        tokens = len(chain) * BLOCK + 1
        outcomes = {"hit": hits[number] * BLOCK, "miss_cold": tokens - hits[number] * BLOCK}
        rows.append({
            "request_id": f"r{number}", "scheduled_ns": number * SECOND, "finished_ns": number * SECOND + 1000,
            "prompt_tokens": tokens, "prompt_block_hashes": chain, "output_block_hashes": [],
            "cached_tokens": hits[number] * BLOCK, "computed_tokens": tokens - hits[number] * BLOCK,
            "prefix_outcomes": outcomes, "infinite_hit_tokens": infinite[number] * BLOCK, "token_ns": [],
        })  # fmt: skip
    return pd.DataFrame(rows)


def ran(traffic: list[list[int]], size: float) -> SimulatedCache:
    cache = SimulatedCache(size, unfinished=1)
    for number, chain in enumerate(traffic):
        cache.look_up(chain, number * SECOND)
    return cache


@pytest.fixture(scope="module")
def traffic() -> list[list[int]]:
    return chains(11, count=400)


def uses_of(traffic, size=30):
    return block_uses(recorded(traffic, ran(traffic, size).hits_of, ran(traffic, 10**9).hits_of), BLOCK)


@pytest.mark.parametrize("seed", [0, *further(1, 2, 3, 4)])
def test_the_curve_is_what_caches_of_those_sizes_hit(seed):
    traffic = chains(seed)
    uses = uses_of(traffic)
    assert not (uses.distance == UNKNOWN).any()
    for size in (8, 12, 20, 30, 47, 80, 150, 10**6):
        real = ran(traffic, size)
        assert uses.hits(size).tolist() == [BLOCK * hit for hit in real.hits_of], size
        assert uses.hit_ratio(size) == pytest.approx(BLOCK * real.hits / uses.queried_tokens.sum())
    assert uses.hits(30).tolist() == uses.hit_tokens.tolist(), "its own size is what was measured"
    assert uses.infinite_ratio == pytest.approx(uses.hit_ratio(10**9))


def test_the_smallest_pool_for_a_share_of_the_hits_is_the_smallest(traffic):
    uses = uses_of(traffic)
    for share in (0.5, 0.9, 1.0):
        size = uses.blocks_for(share)
        assert uses.hits(size).sum() >= share * uses.infinite_tokens.sum() > uses.hits(size - 1).sum()


def test_blocks_of_running_requests_are_on_top_and_take_room():
    """`long` runs while `again` looks its block up: two blocks of `long` and its unfinished one are held beside it."""
    rows = recorded([[1], [7, 8], [1]], [0, 0, 0], [0, 0, 1])
    rows.loc[1, "finished_ns"] = 5 * SECOND
    assert block_uses(rows, BLOCK).distance.tolist() == [3]
    rows.loc[2, "prompt_block_hashes"][:] = [7]
    assert block_uses(rows, BLOCK).distance.tolist() == [0], "it is held: a pool of any size has it"


def test_output_is_used_when_its_request_ends():
    rows = recorded([[1], [5], [1, 2]], [0, 0, 0], [0, 0, 2])
    rows.at[0, "output_block_hashes"], rows.loc[0, "computed_tokens"] = [2], 2 * BLOCK + 3
    assert block_uses(rows, BLOCK).distance.tolist() == [2, 3], "the last block of a sequence ages first"


def test_what_an_aborted_request_did_not_compute_is_in_no_pool():
    rows = recorded([[1, 2, 3], [4], [1, 2, 3]], [0, 0, 0], [0, 0, 3])
    rows.loc[0, "computed_tokens"] = BLOCK
    assert block_uses(rows, BLOCK).distance.tolist() == [2, UNKNOWN, UNKNOWN]


def test_records_without_lookups_tell_nothing(traffic):
    rows = recorded(traffic[:5], [0] * 5, [0] * 5)
    assert block_uses(rows.drop(columns="prompt_block_hashes"), BLOCK) is None
    assert block_uses(rows.assign(prompt_block_hashes=[[]] * 5), BLOCK) is None
    assert block_uses(rows.assign(prefix_outcomes=[None] * 5), BLOCK) is None
    assert block_uses(rows.iloc[:0], BLOCK) is None and block_uses(rows, 0) is None
    alone = block_uses(rows, BLOCK)
    assert len(alone.distance) == 0 and alone.hit_ratio(100) == 0 and alone.blocks_for(0.9) is None
    assert np.array_equal(alone.hits(5), np.zeros(5))
