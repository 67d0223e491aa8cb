"""Eviction policies: leaves first, the same calls evict the same blocks, and each does what its paper says."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.eviction import EVICTION_POLICIES, make_eviction_policy
from sojourn.engine.memory.eviction.ttl import Ttl
from sojourn.engine.memory.eviction.worth import NUM_BINS, age_bin, bin_width, worth_by_age
from sojourn.engine.memory.prefix import chain_hash
from tests.engine.harness import submit
from tests.engine.memory.audits import audit_pool
from tests.engine.simulated import Simulation, sequential

POLICIES = [name for name in EVICTION_POLICIES if name != "ttl"]


def keys_of(chain: list[int]) -> list[bytes]:
    keys, parent = [], b""
    for token in chain:
        keys.append(parent := chain_hash(parent, [token]))
    return keys


def serve(pool: BlockPool, chain: list[int]) -> int:
    """A prompt of single-token blocks comes and goes; how many of them were cached."""
    keys = keys_of(chain)
    blocks = pool.match(keys)
    found = len(blocks)
    pool.take(blocks)
    fresh = pool.allocate(len(keys) - found)
    if fresh is None:
        pool.release(blocks, found)
        return found
    pool.used(blocks)
    blocks += fresh
    for index in range(found, len(keys)):
        blocks[index] = pool.publish(blocks[index], keys[index], keys[index - 1] if index else None)
    audit_pool(pool, [blocks])
    pool.release(blocks, len(blocks))
    return found


def held(pool: BlockPool, chain: list[int]) -> bool:
    return len(pool.match(keys_of(chain))) == len(chain)


chains = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=6), max_size=60)


@settings(max_examples=40)
@given(name=st.sampled_from(POLICIES), prompts=chains, size=st.integers(1, 12))
def test_no_policy_evicts_a_block_with_cached_children_or_loses_one(name, prompts, size):
    pools = [BlockPool(size, 1, eviction=make_eviction_policy(name, size)) for _ in range(2)]
    for chain in prompts:
        found = [serve(pool, chain) for pool in pools]
        assert found[0] == found[1], "the same calls evict the same blocks"
        index = pools[0]._index
        assert all(node.parent is None or node.parent.key in index._nodes for node in index._nodes.values())
        assert all(
            node.children == sum(n.parent is node for n in index._nodes.values()) for node in index._nodes.values()
        )
        audit_pool(pools[0], [])


def test_lfu_keeps_what_was_read_often():
    pool = BlockPool(4, 1, eviction=make_eviction_policy("lfu", 4))
    for chain in ([1], [1], [1], [2], [3], [4], [5], [6]):
        serve(pool, chain)
    assert held(pool, [1]) and not held(pool, [2])


def test_lfu_forgets_that_a_block_was_popular():
    policy = make_eviction_policy("lfu", 4)
    pool = BlockPool(4, 1, eviction=policy)
    for _ in range(8):
        serve(pool, [1])
    block = pool._index._nodes[keys_of([1])[0]]
    assert block.uses == 7
    policy.used(block, age=3 * policy._half_life)
    assert block.uses == 1


def test_segmented_lru_survives_a_scan_and_demotes_the_oldest():
    pool = BlockPool(5, 1, eviction=make_eviction_policy("segmented-lru", 5))
    for chain in ([1], [2], [1], [2]):
        serve(pool, chain)
    for token in range(10, 30):
        serve(pool, [token])
    assert held(pool, [1]) and held(pool, [2])
    for token in (40, 40, 41, 41, 42, 42, 43, 43):  # four more protected ones: only four fit
        serve(pool, [token])
    for token in range(50, 60):
        serve(pool, [token])
    assert not held(pool, [1]) and held(pool, [43])


def test_ttl_frees_what_was_idle_for_too_long_even_where_memory_is_plentiful():
    now = [0]
    pool = BlockPool(8, 1, eviction=Ttl(10, lambda: now[0]))
    serve(pool, [1, 2])
    now[0] = 9_000_000_000
    assert held(pool, [1, 2])
    serve(pool, [1, 2])  # which begins its time again
    now[0] = 18_000_000_000
    assert held(pool, [1, 2])
    now[0] = 20_000_000_000
    assert pool.match(keys_of([1, 2])) == [] and pool.counts().free == 8


def test_a_request_that_is_refused_again_and_again_is_one_use():
    pool = BlockPool(4, 1, eviction=make_eviction_policy("lfu", 4))
    serve(pool, [1])
    for _ in range(50):
        blocks = pool.match(keys_of([1]))
        pool.take(blocks)
        pool.release(blocks, 1)
    serve(pool, [1])
    assert pool._index._nodes[keys_of([1])[0]].uses == 1


def test_bins_of_ages_follow_each_other_without_gaps():
    begins = {}
    for age in range(5000):
        begins.setdefault(age_bin(age), age)
    bins = sorted(begins)
    assert bins[0] == 0 and all(begins[b] <= begins[c] for b, c in pairwise(bins))
    for here, after in pairwise(bins[4:-1]):
        assert begins[after] - begins[here] == pytest.approx(bin_width(here), abs=1)


def test_worth_is_the_best_slope_of_hits_over_room():
    """Against all horizons, the long way."""
    generator = random.Random(1)
    for _ in range(20):
        reuses = [generator.choice([0.0, 0.0, 1.0, 5.0]) for _ in range(NUM_BINS)]
        unused = generator.choice([0.0, 3.0, 50.0])
        worth = worth_by_age(reuses, unused)
        for begin in range(NUM_BINS):
            left, room, hits, best = unused + sum(reuses[begin:]), 0.0, 0.0, 0.0
            for index in range(begin, NUM_BINS):
                room += bin_width(index) * (left - reuses[index] / 2)
                hits, left = hits + reuses[index], left - reuses[index]
                best = max(best, hits / room if room else 0.0)
            assert worth[begin] == pytest.approx(best)


def test_worth_beats_lru_where_single_use_blocks_stream_past_conversations():
    """A system prompt of 8 blocks that returns, among one-shot documents of 24, in a pool of 32."""
    generator = random.Random(2)
    rates = {}
    for name in ("lru", "worth"):
        pool, hits, generator = BlockPool(32, 1, eviction=make_eviction_policy(name, 32)), 0, random.Random(2)
        for turn in range(3000):
            if generator.random() < 0.4:
                hits += serve(pool, [*range(8)])
            else:
                serve(pool, [100 + turn, *range(23)])
        rates[name] = hits
    assert rates["worth"] > 1.5 * rates["lru"]


@pytest.mark.parametrize("name", [*POLICIES, "ttl"])
def test_tokens_and_outcomes_hold_under_every_policy(name):
    generator = random.Random(3)
    knobs = {"eviction_policy": name} | ({"eviction_ttl_seconds": 1e-3} if name == "ttl" else {})
    simulation = Simulation(num_blocks=20, knobs=knobs)
    prompts = {}
    for index in range(40):
        prompt = [7] * generator.choice([0, 8, 12]) + [
            generator.randrange(4) for _ in range(generator.randrange(1, 12))
        ]
        prompts[f"r{index}"] = prompt
        simulation.receive(submit(f"r{index}", prompt, max_tokens=6))
        for _ in range(generator.randrange(4)):
            if simulation.engine.has_work:
                simulation.step()
    simulation.drain()
    simulation.check_idle()
    for request_id, prompt in prompts.items():
        assert simulation.published.tokens[request_id] == sequential(prompt, 6)
        report = simulation.published.ended[request_id].prefix
        assert sum(report.prefix_outcomes.values()) == len(prompt)
