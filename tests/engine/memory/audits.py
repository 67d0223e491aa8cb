"""Audits of the books of the block pool and of the shadow index: what they count, counted the long way."""

from collections.abc import Sequence

from sojourn.engine.memory.block_pool import BlockPool
from sojourn.engine.memory.shadow.index import REAL, ShadowIndex
from sojourn.engine.memory.shadow.observer import ShadowObserver
from sojourn.engine.memory.window import HOLE
from sojourn.engine.techniques.tiers.tiers import KVTiers


def audit_pool(pool: BlockPool, owners: Sequence[Sequence[int]], written: Sequence[int] | None = None) -> None:
    """Asserts that references are exactly what the live sequences' block lists say.

    `written` says how many positions each of the sequences has written.
    """
    expected = [0] * pool.num_blocks
    for blocks in owners:
        for block in blocks:
            if block != HOLE:
                expected[block] += 1
    assert expected == pool._references, "references differ from the owners"
    assert pool.num_active == sum(1 for count in expected if count)
    assert len(set(pool._free)) == len(pool._free)
    assert all(expected[block] == 0 and not pool._index.holds(block) for block in pool._free)
    reusable = sum(1 for block in range(pool.num_blocks) if not expected[block] and pool._index.holds(block))
    assert len(pool._free) + pool.num_active + reusable == pool.num_blocks, "a block is lost"
    if written is not None:
        assert pool.slots_written == _slots(pool, owners, written), "slots are miscounted"


def _slots(pool: BlockPool, owners: Sequence[Sequence[int]], written: Sequence[int]) -> int:
    slots: dict[int, int] = {}
    for blocks, num_tokens in zip(owners, written, strict=True):
        for index, block in enumerate(blocks):
            if block == HOLE:
                continue
            filled = min(pool.block_size, max(0, num_tokens - index * pool.block_size))
            slots[block] = pool.block_size if pool._index.holds(block) else max(slots.get(block, 0), filled)
    return sum(slots.values())


def audit_observer(observer: ShadowObserver) -> None:
    """Asserts that paths, index and, with caching, pool agree."""
    observer.flush()
    pool, shadow, paths = observer._pool, observer.shadow, observer._paths.values()
    is_read = {key: node.idle_since is None for key, node in pool._index._nodes.items()}
    # Behind a window a block may outlive those before it, which the index does not follow in all cases.
    is_exact = pool.prefix_caching and pool.evicts_lru and pool.window is None
    audit_index(shadow, observer._occupied(pool.num_active), is_read if is_exact else None)
    blocks = shadow._nodes.values()
    assert sum(node.readers for node in blocks) == sum(node is not None for path in paths for node in path.read), (
        "a reader is lost"
    )
    again = sum(max(0, len(path.known) - len(path.read)) for path in paths)
    assert sum(node.pending_recomputes for node in blocks) == again, "a recompute is lost"
    if not paths:
        assert not observer._in_flight, "no request computes what is in flight"


def audit_index(shadow: ShadowIndex, occupied: int, cached: dict[bytes, bool] | None) -> None:
    """Asserts that the list, its levels and its boundaries agree, and that the pool's own size is the pool.

    `cached` says of the blocks that the pool could find whether they are read.
    """
    listed, node, below = [], shadow._ring.older, 0
    while node is not shadow._ring:
        assert node.too_small_below >= below and node.readers == 0, "a larger pool would hold less"
        below = node.too_small_below
        listed.append(node)
        node = node.older
    counts = [sum(1 for node in listed if node.smallest_size == size) for size in range(len(shadow._idle))]
    assert counts == shadow._idle, "blocks by size are miscounted"
    for size, oldest in enumerate(shadow._oldest):
        inside = [node for node in listed if node.too_small_below <= size]
        assert oldest is (inside[-1] if inside else shadow._ring), "a boundary is misplaced"
        inside = [node for node in inside if node.lost_below <= size]
        if size >= REAL and cached is not None:  # a smaller pool could not have run what this one runs
            assert occupied + len(inside) <= shadow.sizes[size], "a size holds more than it has"
    assert list(shadow.sampled) == [node.key for node in reversed(listed) if shadow.is_sampled(node)]
    if cached is not None:
        nodes = shadow._nodes.items()
        held = {
            key: node.readers > 0 for key, node in nodes if node.readers or (node.newer and node.smallest_size <= REAL)
        }
        assert held == cached, "the pool's own size is not what the pool holds"


def num_salts(shadow: ShadowIndex) -> int:
    """Salts of which a block is known, or which live requests have."""
    return len(shadow._roots) - 1


def audit_tiers(tiers: KVTiers) -> None:
    """Asserts that slots are neither lost nor shared, and that pins are exactly those of transfers and prefetches."""
    for index in (tiers.host, *(tier.index for tier in tiers.slow)):
        slots = [block.slot for block in index._blocks.values()]
        assert sorted(slots + index._free) == list(range(index.capacity)), "a slot is lost or shared"
        for key, block in index._blocks.items():
            assert (key in index._evictable) == (block.is_ready and not block.pins), "what may go is not what is idle"
    for tier in tiers.slow:
        assert tier.reading_bytes >= 0 and tier.num_writing >= 0
    held = [key for prefetch in tiers.waits.prefetches for key in prefetch.held]
    for key in held:
        assert tiers.host.lookup(key) and tiers.host[key].pins
