"""Faults of the core, on the real engine with the bundled model: what the records of its steps say."""

import contextlib
import statistics

import psutil
import pytest

from sojourn.engine.faults.core import core_death
from sojourn.engine.faults.plan import CoreDeath
from sojourn.metrics.errors import ModelError
from sojourn.metrics.records import STAGES
from tests.engine.harness import drain, hand_over, make_engine, submit

MODEL, MIXTURE = "scenarios/tiny-model", "scenarios/tiny-mixture"


def records_with(faults: str | None, num_requests: int = 2, max_tokens: int = 6):
    engine, published = make_engine(MODEL, faults=faults)
    hand_over(engine, [submit(f"r{index}", list(range(3, 40)), max_tokens) for index in range(num_requests)])
    drain(engine)
    return engine, published


def median_ms(published, column: str) -> float:
    return statistics.median(getattr(record, column) for record in published.records) / 1e6


def stage_ns(published, index: int) -> float:
    return statistics.median(record.stages[index] for record in published.records)


@pytest.fixture(scope="module")
def healthy():
    return records_with(None)[1]


@pytest.mark.parametrize(
    ("faults", "stage"),
    [
        ("slow_host:ms=5", "schedule"),
        ("slow_host:ms=5,stage=prepare,by=sleep", "prepare"),
        ("slow_host:ms=5,stage=commit", "commit"),
        ("slow_sampler:ms=3,us_per_row=1000", "sample"),
    ],
)
def test_a_slow_part_shows_in_its_own_stage(healthy, faults, stage):
    _, slow = records_with(faults)
    grown = {name: stage_ns(slow, index) - stage_ns(healthy, index) for index, name in enumerate(STAGES)}
    assert max(grown, key=grown.get) == stage and grown[stage] > 4.5e6
    assert slow.tokens == healthy.tokens


def test_a_slow_device_stretches_the_steps_that_it_should(healthy):
    _, slow = records_with("slow_device:factor=20,steps=decodes")
    assert median_ms(slow, "device_ns") > 3 * median_ms(healthy, "device_ns")
    assert slow.tokens == healthy.tokens


def test_slow_attention_gives_the_same_tokens_later(healthy):
    _, slow = records_with("slow_attention:times=60")
    assert median_ms(slow, "device_ns") > 1.3 * median_ms(healthy, "device_ns")
    assert slow.tokens == healthy.tokens


def test_a_leak_is_bounded():
    engine, published = records_with("block_leak:blocks=2,most=0.02", num_requests=6)
    counts = engine.scheduler.pool.counts()
    assert counts.active == 5 == int(0.02 * counts.active + 0.02 * (counts.free + counts.reusable))
    assert len(published.tokens) == 6


def test_without_the_setting_nothing_leaks(healthy):
    engine, _ = records_with(None)
    assert engine.scheduler.pool.counts().active == 0


def test_a_core_dies_at_its_moment_and_the_next_one_lives():
    ends = []
    engine, _ = make_engine(MODEL)
    core_death(engine, CoreDeath(at_s=0), ends.append)
    hand_over(engine, [submit("r", [5, 6, 7], 1)])
    drain(engine)
    assert ends == [86]
    next_core, _ = make_engine(MODEL)
    next_core.step_number = 1
    core_death(next_core, CoreDeath(at_s=0), ends.append)
    hand_over(next_core, [submit("r", [5, 6, 7], 1)])
    drain(next_core)
    assert ends == [86]


RANKS = {"load_format": "dummy", "expert_parallel": 2, "threads": 1, "num_kv_blocks": 64}


@pytest.mark.server
def test_a_rank_that_is_slow_computes_longer_and_a_router_that_is_skewed_chooses_the_first_experts():
    with published_by(faults="slow_rank:rank=1,ms=30;skewed_router:share=1") as published:
        ranks = [record.rank_busy_ns for record in published.records if len(record.rank_busy_ns) == 2]
        counted = [record.expert_tokens for record in published.records if record.expert_tokens]
    assert statistics.median(other - own for own, other in ranks) > 20e6
    assert all(tokens[0] == tokens[1] > 0 and not any(tokens[2:]) for tokens in counted)


@contextlib.contextmanager
def published_by(**settings):
    engine, published = make_engine(MIXTURE, **RANKS, **settings)
    try:
        hand_over(engine, [submit("r", list(range(3, 40)), 6)])
        drain(engine)
        yield published
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"faults": "slow_rank:rank=0,ms=5"}, "there are 1 ranks"),
        ({"faults": "skewed_router:share=0.5"}, "needs a model with routed experts"),
    ],
)
def test_a_fault_of_ranks_or_experts_without_them_is_refused(settings, sentence):
    with pytest.raises(ModelError, match=sentence):
        make_engine(MODEL, **settings)


@pytest.mark.server
def test_a_rank_that_is_none_of_the_group_is_refused_and_no_process_stays():
    with pytest.raises(ModelError, match="names rank 2 of a parallel group, and there are 2 ranks"):
        make_engine(MIXTURE, **RANKS, faults="slow_rank:rank=2,ms=5")
    assert not [each for each in psutil.Process().children() if "techniques.group.rank" in " ".join(each.cmdline())]


def test_slow_link_without_ranks_is_refused():
    with pytest.raises(ModelError, match="slow_link needs a parallel group"):
        make_engine(MODEL, faults="slow_link:ms=2")


def test_a_slow_disk_shows_in_the_reads_of_its_tier(tmp_path):
    """A second engine finds the prompt on the disk that the first one has filled."""
    prompt, taken = list(range(3, 220)), {}
    for faults in (None, "slow_kv_disk:ms=20"):
        engine, published = make_engine(
            MODEL, faults=faults, kv_disk_path=tmp_path, kv_host_gib=1e-2, kv_store_policy="fill"
        )
        hand_over(engine, [submit("r", prompt, 2)])
        drain(engine)
        engine.close()
        taken[faults] = sum(record.tier_load_ns.get("disk", 0) for record in published.records)
        loaded = sum(record.tier_loaded_bytes.get("disk", 0) for record in published.records)
    assert loaded > 0 and taken[None] == 0
    assert taken["slow_kv_disk:ms=20"] > 20e6
