"""Blocks and prefixes: pure bookkeeping, on its own."""

import pytest

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.prefix import PrefixIndex, chain_hash, root_hash
from tests.engine.memory.audits import audit_pool


def chain(*blocks: list[int], salt: str = "") -> list[bytes]:
    keys, parent = [], root_hash(salt)
    for tokens in blocks:
        parent = chain_hash(parent, tokens)
        keys.append(parent)
    return keys


def test_a_block_with_cached_children_is_not_evicted_before_them():
    index = PrefixIndex()
    parent, child = chain([1, 2], [3, 4])
    index.insert(parent, None, 0)
    index.insert(child, parent, 1)
    index.idle(0)  # its reader is gone, while another request still reads the child
    assert index.evict() is None
    index.idle(1)
    assert [index.evict().block, index.evict().block, index.evict()] == [1, 0, None]


def test_a_block_that_got_a_child_while_nobody_read_it_is_not_evicted_before_it():
    index = PrefixIndex()
    parent, child = chain([1, 2], [3, 4])
    index.insert(parent, None, 0)
    index.idle(0)  # ... and another request, with a twin of this block, computes what comes after it
    index.insert(child, parent, 1)
    assert index.evict() is None


def test_prefixes_that_are_never_evicted_cost_no_memory_each_time_they_are_read():
    pool = BlockPool(8, 1)
    key = chain([1])
    for _ in range(1000):
        blocks = pool.match(key)
        pool.take(blocks)
        if not blocks:
            blocks = pool.allocate(1)
            pool.publish(blocks[0], key[0], None)
        pool.release(blocks, 1)
    assert len(pool._index._candidates[0]) < 100


def test_the_same_tokens_after_another_beginning_are_another_prefix():
    assert chain([1], [2])[1] != chain([3], [2])[1]
    assert chain([1, 2]) != chain([1], [2])[:1]
    assert chain([1]) != chain([1], salt="x")


def test_a_block_read_again_is_no_longer_up_for_eviction():
    pool = BlockPool(2, 1)
    key = chain([1])
    blocks = pool.allocate(1)
    pool.publish(blocks[0], key[0], None)
    pool.release(blocks, 1)
    pool.take(pool.match(key))
    assert pool.allocate(2) is None
    assert pool.allocate(1) is not None
    assert pool.match(key) == blocks


def test_what_does_not_fit_changes_nothing():
    pool = BlockPool(3, 1)
    held = pool.allocate(2)
    before = pool.counts()
    assert pool.allocate(2) is None
    assert pool.counts() == before
    audit_pool(pool, [held])


def test_a_block_given_back_twice_is_noticed():
    pool = BlockPool(2, 1)
    blocks = pool.allocate(1)
    pool.release(blocks, 1)
    with pytest.raises(AssertionError, match="twice"):
        pool.release(blocks, 1)


def test_a_prefix_known_already_keeps_its_first_block():
    pool = BlockPool(4, 1)
    key = chain([1])
    first, second = pool.allocate(1), pool.allocate(1)
    assert pool.publish(first[0], key[0], None) == first[0]
    assert pool.publish(second[0], key[0], None) == first[0]
    assert pool.match(key) == first
    assert pool.counts().free == 3  # the twin was given up
    audit_pool(pool, [first, first])
