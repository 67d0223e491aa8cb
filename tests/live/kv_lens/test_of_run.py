"""The lens of a recorded run, against caches that really ran."""

import msgspec
import pytest

from sojourn.live.kv_lens.document import SIZES, KvLens
from sojourn.live.kv_lens.of_run import lens_of_run
from sojourn.metrics.errors import RunDataError
from sojourn.metrics.memory.prefix_outcomes import RATIOS
from sojourn.metrics.records import KvEventRecord
from sojourn.metrics.records.tables import columns
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import replace_table
from tests.live.kv_lens.recorded_runs import BLOCK, NULLS, POOL, run_of
from tests.metrics.memory.simulated_cache import SimulatedCache, chains


@pytest.fixture(scope="module")
def traffic():
    return chains(21, count=400)


def test_every_size_hits_what_a_cache_of_that_size_hit(tmp_path, traffic):
    run, caches = run_of(tmp_path / "run", traffic, events=False)
    lens = lens_of_run(run)
    sizes = {point.ratio or 1e9: point for point in lens.curve}
    for ratio in (*RATIOS, 1e9):
        point = sizes[ratio]
        assert point.hit_rate == pytest.approx(caches[ratio].hits * BLOCK / lens.queried_tokens)
        assert point.low <= point.hit_rate <= point.high and point.high - point.low < 0.25
        assert point.saved_tokens == (caches[ratio].hits - caches[1.0].hits) * BLOCK
    assert (lens.source, lens.pool_blocks, lens.curve_error) == ("records", POOL, 0)
    assert lens.infinite_hit_rate == lens.curve[-1].hit_rate and lens.hit_rate == sizes[1.0].hit_rate
    assert f"{sizes[2.0].hit_rate:.1%}" in lens.headline and "Twice the memory" in lens.headline
    for ratio in SIZES:
        cache = SimulatedCache(round(ratio * POOL), unfinished=1)
        assert sizes[ratio].hit_rate == pytest.approx(sum(map(cache.look_up, traffic)) * BLOCK / lens.queried_tokens)
    for enough in lens.enough:
        cache = SimulatedCache(enough.blocks, unfinished=1)
        assert sum(cache.look_up(chain) for chain in traffic) >= enough.share * caches[1e9].hits
    assert sum(lens.outcomes.values()) == pytest.approx(1)
    assert msgspec.json.decode(msgspec.json.encode(lens), type=KvLens) == lens


def test_classes_and_requests_that_took_the_room(tmp_path, traffic):
    run, _ = run_of(tmp_path / "run", traffic, events=False)
    lens = lens_of_run(run)
    missed = lens.outcomes["miss_evicted"] * lens.queried_tokens
    assert [(each.name, each.kind) for each in lens.takers] == [("even", "class"), ("r0", "request")]
    assert all(each.missed_tokens == pytest.approx(missed) and each.evicted_blocks is None for each in lens.takers)


def test_events_beside_the_records_give_ages_and_idle_times(tmp_path, traffic):
    run, caches = run_of(tmp_path / "run", traffic, events=True)
    lens = lens_of_run(run)
    removed = sum(len(event.hashes) for event in caches[1.0].events if event.kind == "removed")
    assert lens.times["age_when_evicted"].blocks == removed == lens.pools[0].removed
    idle, age = lens.times["idle_when_evicted"], lens.times["age_when_evicted"]
    assert idle.blocks == removed and idle.p50_s <= age.p50_s and idle.p90_s <= age.p90_s
    again = sum(each.evicted_blocks for each in lens.takers if each.kind == "class")
    assert again <= removed


def test_events_alone_are_a_lens_without_hits(tmp_path, traffic):
    run, caches = run_of(tmp_path / "run", traffic, events=True)
    (tmp_path / "run" / "requests.parquet").unlink()
    lens = lens_of_run(run)
    assert (lens.source, lens.hit_rate, lens.lookups) == ("events", None, None)
    saved = {point.ratio: point.saved_tokens for point in lens.curve}
    assert saved[2.0] == (caches[2.0].hits - caches[1.0].hits) * BLOCK
    assert saved[None] == (caches[1e9].hits - caches[1.0].hits) * BLOCK
    assert any("hits are not in KV events" in each for each in lens.unknown)


def test_what_a_run_does_not_say_is_said(tmp_path, traffic):
    run, _ = run_of(tmp_path / "other", traffic, events=False, engine={"eviction_policy": "lfu"})
    assert any("evicts by lfu" in each for each in lens_of_run(run).warnings)
    run, _ = run_of(tmp_path / "sizeless", traffic, events=True, core=False)
    lens = lens_of_run(run)
    assert lens.pool_blocks is None and [point.ratio for point in lens.curve] == [None]
    assert any("how many blocks" in each for each in lens.unknown)
    bare = RunDirectory.create(tmp_path / "bare", {"scenario": "x", "engine": {}} | dict.fromkeys(NULLS))
    with pytest.raises(RunDataError, match="tells nothing of its cache"):
        lens_of_run(bare)
    bare.update_meta(servers=[{"name": "server-0"}, {"name": "server-1"}])
    with pytest.raises(RunDataError, match="server-0, server-1"):
        lens_of_run(bare)


def test_a_cache_that_loses_nothing_needs_no_memory(tmp_path):
    run, _ = run_of(tmp_path / "run", [[1, 2], [1, 2, 3], [1, 2]], events=True)
    assert "more memory would not help" in lens_of_run(run).headline
    replace_table(tmp_path / "run" / "kv_events.parquet", columns("kv_events", [KvEventRecord(0, "stored", [1])]))
    assert lens_of_run(run).pools[0].stored == 1
