"""What events of stored and removed blocks tell, against caches of other sizes that really ran."""

from collections import Counter
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sojourn.metrics.memory.pool_history import CHAIN, NAMELESS, BlockHistory, PoolHistory
from sojourn.metrics.records import KvEventRecord
from tests.further import further
from tests.metrics.memory.simulated_cache import SECOND, SimulatedCache, chains


def ran(traffic: list[list[int]], size: float) -> SimulatedCache:
    cache = SimulatedCache(size)
    for number, chain in enumerate(traffic):
        cache.look_up(chain, number * SECOND, f"r{number}")
    return cache


def history(events) -> PoolHistory:
    found = PoolHistory()
    for event in events:
        found.apply(event)
    return found


@pytest.mark.parametrize("seed", [0, 1, *further(2, 3, 4, 5, 6, 7)])
@pytest.mark.parametrize("size", [12, 40])
def test_events_of_one_pool_tell_what_larger_pools_save(seed, size):
    traffic = chains(seed)
    small = ran(traffic, size)
    found = history(small.events)
    assert found.saved_by(0) == 0 and found.stored_again > 50, "nothing is proved without evictions"
    for more in (1, 5, size // 2, size, 3 * size, 7 * size):
        assert found.saved_by(more) == ran(traffic, size + more).hits - small.hits
    assert found.stored_again == ran(traffic, 10**9).hits - small.hits
    assert found.held == len(small.blocks) and found.peak == size
    assert found.stored - found.removed == found.held and found.removed_unknown == 0


def test_lives_and_gaps_are_those_of_the_blocks():
    small = ran(chains(3), 30)
    lives, gaps, since, removed = [], [], {}, {}
    for event in small.events:
        for block in event.hashes:
            if event.kind == "stored":
                since[block] = event.ns
                if block in removed:
                    gaps.append(event.ns - removed.pop(block))
            else:
                lives.append(event.ns - since.pop(block))
                removed[block] = event.ns
    found = history(small.events)
    for histogram, values in ((found.lives, lives), (found.gaps, gaps)):
        assert histogram.count == len(values) and histogram.mean == pytest.approx(sum(values) / len(values))
        for share in (0.1, 0.5, 0.9):
            exact = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
            assert histogram.quantile(share) == pytest.approx(exact, rel=0.01)


def test_evictor_is_the_request_that_needed_the_room():
    """With the requests named in the events, and from the order of events alone, it is the same one."""
    named = ran(chains(4), 30).events
    takers = Counter()
    for event in named:
        if event.kind == "removed":
            takers[event.request] += len(event.hashes)
    by_name = history(named)
    assert by_name.taken_by == takers
    without = [KvEventRecord(e.ns, e.kind, e.hashes, e.parent, e.block_size,
                             session=e.request if e.kind == "stored" else None) for e in named]  # fmt: skip
    assert history(without).taken_by == takers
    assert history(without).missed_by == by_name.missed_by and by_name.missed_by.total() == by_name.stored_again


def test_without_names_a_sequence_is_named_after_its_first_block():
    events = [
        KvEventRecord(0, "stored", [1, 2], None, 16), KvEventRecord(1, "stored", [3], 2, 16),
        KvEventRecord(2, "removed", [3]), KvEventRecord(3, "stored", [9], None, 16),
        KvEventRecord(4, "stored", [3], 2, 16),
    ]  # fmt: skip
    found = history(events)
    assert found.taken_by == {f"{CHAIN}00000000": 1} and found.missed_by.total() == 1


def test_a_block_that_is_stored_twice_leaves_with_its_last_copy():
    events = [KvEventRecord(0, "stored", [1]), KvEventRecord(1, "stored", [1]), KvEventRecord(2, "removed", [1])]
    found = history(events)
    assert (found.held, found.stored_twice, found.lives.count) == (1, 1, 0)
    found.apply(KvEventRecord(3, "removed", [1]))
    found.apply(KvEventRecord(4, "stored", [1]))
    assert (found.held, found.stored_again, found.lives.quantile(0.5)) == (1, 1, 3)


@pytest.mark.parametrize("seed", [0, 1, 2, *further(*range(3, 12))])
def test_lost_messages_restarts_and_unknown_blocks_never_count_more_than_happened(seed):
    """Whatever is left out of a stream: what is said of the rest is true, and no more is claimed than of the whole."""
    dice = Random(seed)
    traffic = chains(seed)
    events = ran(traffic, 25).events
    whole = history(events)
    kept, lost, clears = [], 0, 0
    for event in events:
        if dice.random() < 0.05:
            lost += 1
            kept.append(KvEventRecord(event.ns, "lost", lost=1))
        else:
            kept.append(event)
    found = history(kept)
    assert found.lost == lost and found.stored <= whole.stored
    assert found.lives.count <= whole.lives.count and found.places.count + found.unplaced == found.stored_again
    assert all(found.saved_by(more) <= whole.saved_by(more) for more in (5, 25, 100, 10**6))
    assert found.stored_again <= found.stored and found.taken_by.total() <= found.removed
    restarted = []
    for event in events:
        if dice.random() < 0.02:
            clears += 1
            restarted.append(KvEventRecord(event.ns, "cleared"))
        restarted.append(event)
    after = history(restarted)
    assert after.cleared == clears and after.stored_again <= whole.stored_again
    late = history(events[len(events) // 2 :])  # the record began in the middle
    assert late.stored_again <= whole.stored_again
    assert all(late.saved_by(more) <= whole.saved_by(more) for more in (5, 25, 100))


def test_memory_is_bounded_and_what_is_forgotten_is_counted():
    found = PoolHistory(remembered=50, most_owners=20)
    for number in range(2000):
        found.apply(KvEventRecord(number, "stored", [number, -number - 1], request=f"r{number}"))
        found.apply(KvEventRecord(number, "removed", [number, -number - 1], request=f"r{number}"))
        found.apply(KvEventRecord(number, "removed", [10**6 + number]))
    assert found.forgotten == 6000 - 50 and found.removed_unknown == 2000
    assert len(found.taken_by) <= 21 and found.taken_by[NAMELESS] > 1900
    assert found.places.count == 0 and len(found._deaths) == len(found._removed) == 50


def test_media_and_servers_are_told_apart():
    found = BlockHistory()
    found.apply([
        KvEventRecord(0, "stored", [1, 2], server="a"), KvEventRecord(0, "stored", [1], medium="CPU", server="a"),
        KvEventRecord(0, "stored", [1], server="b"), KvEventRecord(1, "removed", [1], server="a"),
        KvEventRecord(2, "cleared", server="b"),
    ])  # fmt: skip
    assert {key: pool.held for key, pool in found.pools.items()} == {("a", "GPU"): 1, ("a", "CPU"): 1, ("b", "GPU"): 0}


BLOCKS = st.lists(st.integers(0, 9), max_size=4)
ANY_EVENTS = st.lists(
    st.one_of(
        st.builds(KvEventRecord, st.just(0), st.sampled_from(["stored", "removed"]), BLOCKS,
                  st.none() | st.integers(0, 9), st.integers(0, 16), st.just("GPU"),
                  st.sampled_from([None, "r", "s"]), st.sampled_from([None, "x"])),
        st.builds(KvEventRecord, st.just(0), st.sampled_from(["cleared", "lost"]), lost=st.integers(0, 3)),
    )
)  # fmt: skip


@settings(max_examples=150)
@given(ANY_EVENTS)
def test_events_in_an_order_that_no_server_sends_break_nothing(events):
    found = PoolHistory(remembered=5)
    for number, event in enumerate(events):
        found.apply(msgspec.structs.replace(event, ns=number))
        assert 0 <= found.held <= found.peak
        assert found.places.count + found.unplaced == found.stored_again <= found.stored
        assert len(found._deaths) == len(found._removed) <= 5 and not found._deaths.keys() & found._held.keys()
        assert found.held == sum(life.copies for life in found._held.values())
