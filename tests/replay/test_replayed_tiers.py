"""KV tiers of a replay: stores that only take time, under the engine's own books."""

import pandas as pd
import pytest

from sojourn.engine.config import EngineConfig
from sojourn.metrics.errors import ReplayError
from sojourn.metrics.memory.plan import GIB
from sojourn.replay.load import BlockHashes, LoadChange, ReplayedLoad
from sojourn.replay.replica import make_replica
from sojourn.replay.routing import RoundRobin
from sojourn.replay.simulated_runner import VirtualClock
from sojourn.replay.simulated_tiers import TierSpeed, TimedStore, check_tiers, tier_speeds
from tests.replay.simulated_run import Ask
from tests.replay.test_replay_oracle import SimulatedTurns, recorded

TOKEN_BYTES = 1 << 16
FAST = {"host": TierSpeed(10.0, 10.0), "disk": TierSpeed(4.0, 4.0)}  # cheaper than computing 40 tokens: 3 ms
PREFIXES = [[1000 * stem + place for place in range(40)] for stem in range(1, 7)]


def replay(speeds=FAST, **settings):
    """Six prompts take turns, twice, in a pool that holds two of them; each has ended before the next one comes."""
    asks = [Ask(f"r{i}", i * 200_000_000, [*PREFIXES[i % 6], 9000 + i], 4) for i in range(12)]
    settings |= {"block_size": 4, "max_num_batched_tokens": 64, "num_kv_blocks": 28}
    config = EngineConfig(model="", telemetry="off", **settings)
    loads = recorded(asks)
    for request, ask in zip(loads.requests, asks, strict=True):
        request.token_ids = [*ask.prompt, *range(-100 * request.due_ns - 4, -100 * request.due_ns)]
    load = ReplayedLoad(loads, LoadChange(), BlockHashes(4), max_waiting=99, pool_tokens=10**6)
    sizes = {"block_bytes": 4 * TOKEN_BYTES, "tier_speeds": speeds}
    replica = make_replica(config, SimulatedTurns(), load, overlap=False, **sizes)
    sent = load.run([replica], RoundRobin(1))
    assert all(each.status == "ok" for each in sent)
    return sent


def test_host_memory_gives_back_what_the_pool_evicted():
    without, with_host = replay(), replay(kv_host_gib=2)
    assert sum(each.cached_tokens for each in without) == 0
    assert [each.cached_tokens for each in with_host] == [0] * 6 + [40] * 6


def test_a_read_of_the_disk_is_waited_for_while_the_loop_sleeps():
    """Host memory has a slot for one prompt: those before it are on the disk only."""
    room = {"kv_host_gib": 10.5 * 4 * TOKEN_BYTES / GIB, "kv_disk_path": "anywhere"}
    fast, slow = replay(**room), replay({**FAST, "disk": TierSpeed(2.0, 4.0)}, **room)
    assert sum(each.cached_tokens for each in fast) > 0
    read_again = [place for place in range(6, 12) if slow[place].cached_tokens == 40 == fast[place].cached_tokens]
    assert read_again
    for place in read_again[:1]:  # the first read teaches the speed
        assert slow[place].first_ns - fast[place].first_ns == pytest.approx(40 * TOKEN_BYTES * (1 / 2 - 1 / 4), rel=0.1)


def test_reads_and_writes_of_a_store_pass_one_after_the_other():
    clock = VirtualClock()
    store = TimedStore(100, TierSpeed(load=10.0, store=1.0), clock)
    for key in (b"a", b"b"):
        store.read(key, 0)
        store.write(key, 1)
    clock.now_ns = 100.0
    assert [(moved.key, moved.is_read) for moved in store.finished()] == [(b"a", True), (b"b", True), (b"a", False)]
    clock.now_ns = 200.0
    assert [moved.ended_ns - moved.began_ns for moved in store.finished()] == [100]


def test_speeds_are_those_of_the_steps():
    steps = pd.DataFrame({
        "tier_loaded_bytes": [{"host": 100}, None, {"host": 300}], "tier_load_ns": [{"host": 10}, None, {"host": 30}],
        "tier_stored_bytes": [[("host", 50), ("disk", 8)], None, None],
        "tier_store_ns": [[("host", 100), ("disk", 4)], None, None],
    })  # fmt: skip
    assert tier_speeds(steps) == {"disk": TierSpeed(2.0, 2.0), "host": TierSpeed(10.0, 0.5)}
    assert tier_speeds(pd.DataFrame({"step": [1]})) == {}


def test_a_tier_without_a_speed_and_one_that_others_fill_are_refused():
    host = EngineConfig(model="", kv_host_gib=1)
    check_tiers(host, FAST)
    with pytest.raises(ReplayError, match="kv_host_gib adds a tier whose speed"):
        check_tiers(host, {})
    with pytest.raises(ReplayError, match="kv_remote_url=null"):
        check_tiers(EngineConfig(model="", kv_remote_url="lm://127.0.0.1:1"), FAST)
