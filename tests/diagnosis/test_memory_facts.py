"""What the records of a run say about its prefix cache, on tables that are made for one answer each."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from sojourn.diagnosis.memory_facts import (
    eviction,
    one_shots,
    pool_blocks,
    pool_curve,
    prefix_use,
    prompt_order,
    shared_lengths,
)
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import write_segment

Table = Callable[..., pd.DataFrame]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """Rows of `requests` as a reader of a run finds them."""

    def read(*records: RequestRecord) -> pd.DataFrame:
        write_segment(tmp_path, "requests", [row(record) for record in records], "0")
        return RunDirectory(tmp_path).table("requests")

    return read


def asked(name: str, outcomes: dict[str, int], **more) -> RequestRecord:
    return RequestRecord(name, 0, 1, prefix_outcomes=outcomes, prompt_tokens=sum(outcomes.values()), **more)


def steps(pool: int = 100, **more) -> pd.DataFrame:
    parts = {"blocks_free": [pool - 10], "blocks_active": [10], "blocks_reusable": [0]}
    return pd.DataFrame({**parts, **{name: [cell] for name, cell in more.items()}})


NEVER = RequestRecord("never placed", 0, 1, prompt_tokens=9999)


def test_outcomes_are_shares_of_the_tokens_that_asked(table):
    use = prefix_use(table(
        asked("a", {"miss_cold": 100}), asked("b", {"hit": 60, "miss_evicted": 20, "miss_cold": 20},
                                              infinite_hit_tokens=80), NEVER,
    ))  # fmt: skip
    assert use.prompt_tokens == 200
    assert (use.hit_share, use.infinite_share) == (0.3, 0.4)
    assert use.outcomes == {"miss_cold": 0.6, "hit": 0.3, "miss_evicted": 0.1}


def test_the_pool_that_suffices_is_computed_between_the_measured_sizes(table):
    curve = pool_curve(
        table(asked("a", {"hit": 20, "miss_evicted": 80}, infinite_hit_tokens=100,
                    resized_hit_tokens=[10, 20, 60, 100, 100])), pool_blocks=100,
    )  # fmt: skip
    assert curve.hit_share(100) == 0.2 and curve.hit_share(150) == pytest.approx(0.4)
    assert curve.hit_share(10_000) == 1.0
    assert curve.blocks_for(0.9) == 400, "60 % at 200 blocks, and nobody knows what 350 would hit"
    assert curve.blocks_for(0.01) == 50, "nothing is known below half the pool"


def test_a_pool_that_no_measured_size_makes_good_has_no_size(table):
    curve = pool_curve(
        table(asked("a", {"miss_evicted": 100}, infinite_hit_tokens=100, resized_hit_tokens=[0, 0, 0, 10, 20])), 100
    )
    assert curve.blocks_for(0.9) is None
    assert pool_curve(table(asked("a", {"miss_cold": 9}, resized_hit_tokens=[0] * 5)), 100).blocks_for() is None


def test_smaller_blocks_catch_what_ends_below_a_block(table):
    requests = table(*(
        asked(f"r{i}", {"miss_cold": 40}, prefix_shared_tokens=shared) for i, shared in enumerate((0, 12, 12, 12))
    ))  # fmt: skip
    lengths = shared_lengths(requests, block_size=16)
    assert (lengths.below_block, lengths.p50_tokens) == (1.0, 12)
    assert lengths.shared_share == 36 / 160
    assert lengths.caught[16] == 0 and lengths.caught[8] == 24 / 160 and lengths.caught[4] == 36 / 160
    assert lengths.block_size_for() == 4 and lengths.block_size_for(0.6) == 8


def test_the_last_token_of_a_prompt_is_never_caught(table):
    lengths = shared_lengths(table(asked("a", {"miss_cold": 32}, prefix_shared_tokens=32)), block_size=16)
    assert lengths.caught[16] == 0.5 and lengths.caught[1] == 31 / 32


def test_a_common_part_behind_something_that_differs_is_told_by_where_prompts_part(table):
    order = prompt_order(table(
        asked("a", {"miss_cold": 100}, repeated_tokens=0, movable_tokens=0, prefix_shared_tokens=0),
        asked("b", {"miss_cold": 100}, repeated_tokens=80, movable_tokens=80, prefix_shared_tokens=3),
        asked("not looked at", {"miss_cold": 1000}),
    ))  # fmt: skip
    assert (order.movable_requests, order.movable_share) == (0.5, 0.4)
    assert order.diverged_p50_tokens == 3 and order.is_early


def test_text_that_is_shared_as_a_prefix_is_in_no_wrong_order(table):
    order = prompt_order(
        table(asked("a", {"hit": 80, "miss_cold": 20}, repeated_tokens=80, movable_tokens=0, prefix_shared_tokens=80))
    )
    assert order.movable_share == 0 and order.diverged_p50_tokens is None and not order.is_early


def test_evictions_by_prompts_that_nobody_shares_are_pollution(table):
    requests = table(
        asked("source", {"miss_cold": 64}, klass="chat"),
        asked("document", {"miss_cold": 640}, klass="documents", prefix_shared_tokens=3, prefix_source="source"),
        asked("again", {"miss_evicted": 64}, klass="chat", prefix_source="source", prefix_shared_tokens=64,
              evicted_by={"document": 48, "source#1": 16}, evicted_ago_ns=2_000_000_000),
    )  # fmt: skip
    assert one_shots(requests, 16) == {"document"}
    found = eviction(requests, steps(reuse_distance_blocks=[50, 150, 160], reuse_gap_ns=[10**9, 3 * 10**9],
                                     evicted_idle_ns=[10**9]), 16)  # fmt: skip
    assert found.missed_share == 64 / 768
    assert found.one_shot_share == 0.75
    assert found.by_class == {"documents": 0.75, "chat": 0.25}
    assert found.reuse_distance_p50_blocks == 150 and found.beyond_pool_share == pytest.approx(2 / 3)
    assert (found.reuse_gap_p50_s, found.evicted_idle_p50_s) == (2, 1)
    assert found.thrashes


def test_a_pool_that_keeps_what_is_used_again_does_not_thrash(table):
    requests = table(asked("a", {"hit": 64}))
    found = eviction(requests, steps(reuse_distance_blocks=[50, 60], reuse_gap_ns=[10**9], evicted_idle_ns=[9 * 10**9]),
                     16)  # fmt: skip
    assert found.beyond_pool_share == 0 and not found.thrashes


def test_a_run_without_the_records_has_no_facts(table):
    requests = table(asked("a", {"hit": 64}))
    older = requests.drop(columns=["prefix_source", "prefix_shared_tokens", "movable_tokens", "repeated_tokens"])
    assert shared_lengths(older, 16) is None and prompt_order(older) is None and one_shots(older, 16) == set()
    assert eviction(older, steps(), 16).one_shot_share == 0
    for made in (prefix_use, prompt_order):
        assert made(requests.iloc[:0]) is None and made(requests.drop(columns="prefix_outcomes")) is None
    assert pool_curve(requests, 0) is None
    assert eviction(requests.iloc[:0], steps(), 16) is None
    assert pool_blocks(steps().iloc[:0]) == 0 and pool_blocks(steps(64)) == 64
