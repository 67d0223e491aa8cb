"""Blocks that hold nothing, and blocks that nobody holds, on tables that are made for one answer each."""

import pandas as pd
import pytest

from sojourn.diagnosis.block_facts import fragmentation, leak


def requests(*spans: tuple[int, int, int, int]) -> pd.DataFrame:
    """Of (scheduled, finished, prompt tokens, output tokens)."""
    return pd.DataFrame([
        {"request_id": f"r{i}", "scheduled_ns": scheduled, "finished_ns": finished, "prompt_tokens": prompt,
         "output_tokens": output}
        for i, (scheduled, finished, prompt, output) in enumerate(spans)
    ], columns=["request_id", "scheduled_ns", "finished_ns", "prompt_tokens", "output_tokens"])  # fmt: skip


def steps(
    active: list[int], pool: int = 100, written: list[int] | None = None, names=lambda at: ["r0"]
) -> pd.DataFrame:
    """A step every 10 ns."""
    return pd.DataFrame([
        {"step": at, "begin_ns": 10 * at, "end_ns": 10 * at + 10, "blocks_active": blocks, "blocks_free": pool - blocks,
         "blocks_reusable": 0, "request_ids": names(at), "new_tokens": [1] * len(names(at)),
         "past_tokens": [15] * len(names(at)), "slots_written": (written or active)[at]}
        for at, blocks in enumerate(active)
    ])  # fmt: skip


def test_slots_without_a_token_are_shares_over_time():
    found = fragmentation(requests((0, 20, 20, 0)), steps([2, 2], written=[20, 20]), block_size=16)
    assert found.unwritten_share == pytest.approx(12 / 32)
    assert found.tail_share == pytest.approx(12 / 32)
    assert found.pool_use == pytest.approx(0.02)
    assert found.tail_share_with(16, 8) == pytest.approx(6 / 32)


def test_room_for_a_prompt_that_is_still_computed_is_no_tail():
    found = fragmentation(requests((0, 20, 160, 0)), steps([10, 10], written=[16, 160]), block_size=16)
    assert found.unwritten_share == pytest.approx(144 / 320) and found.tail_share == 0


def test_blocks_that_live_requests_can_hold_are_no_leak():
    found = leak(requests((0, 200, 64, 16), (50, 200, 64, 16)), steps([5] * 5 + [10] * 15), 16)
    assert found.by_stretch == [0, 0, 0, 0] and not found.stays and found.steps == (0, 0)


def test_blocks_that_stay_after_their_requests_are_a_leak_that_grows():
    spans = [(10 * at, 10 * at + 9, 30, 2) for at in range(40)]
    found = leak(requests(*spans), steps([2 + at for at in range(40)]), 16)
    assert found.stays
    assert found.by_stretch == sorted(found.by_stretch)
    assert 25 <= found.blocks <= 39, "at most what leaked"
    assert found.share_of_pool == found.blocks / 100 and found.blocks_per_request == pytest.approx(found.blocks / 40)
    assert found.steps[1] == 39


def test_a_request_without_a_record_holds_what_its_steps_say():
    names = ["r0", "still running#1"]
    found = leak(requests((0, 400, 16, 16)), steps([7] * 40, names=lambda at: names), 16)
    assert found.blocks == 0
    assert leak(requests((0, 400, 16, 16)), steps([8] * 40, names=lambda at: ["r0"]), 16).blocks == 4


def test_a_leak_that_is_over_does_not_grow():
    found = leak(requests((0, 400, 16, 16)), steps([4] * 10 + [9] * 30), 16)
    assert found.by_stretch == [0, 5, 5, 5] and found.stays


def test_a_run_without_steps_or_slots_has_no_facts():
    assert leak(requests(), steps([1]).iloc[:0], 16) is None
    assert fragmentation(requests(), steps([1]).iloc[:0], 16) is None
    assert fragmentation(requests((0, 1, 1, 1)), steps([2], written=[0]), 16) is None
