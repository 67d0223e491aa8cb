"""The overview and the report name the prefix cache's share beside the ideal one, where a load shares anything."""

from types import SimpleNamespace

import pandas as pd

from sojourn.ui.markup.fragments import key_numbers

REQUESTS = pd.DataFrame({
    "status": ["ok", "ok"], "cached_tokens": [32.0, 0.0], "prompt_tokens": [64.0, 36.0], "ttft_ms": [1.0, 2.0],
    "tpot_ms": [1.0, 2.0], "output_tokens": [2.0, 2.0], "due_ns": [0.0, 1.0], "last_byte_ns": [1e9, 2e9],
})  # fmt: skip


def names(meta: dict) -> dict[str, tuple]:
    run = SimpleNamespace(requests=REQUESTS, diagnosis=None, meta=meta, is_sample=False, num_requests=2)
    return {tile[0]: tile[1:] for tile in key_numbers(run)}


def test_tile_has_the_achieved_share_and_the_ideal_one():
    told = names({"workload": {"prefix": {"ideal_hit_rate": 0.5, "block_tokens": 16}}})["prefix cache"]
    assert told[0].startswith("32") and told[1] == "of prompt tokens" and told[2].startswith("ideal 50")


def test_load_that_shares_nothing_has_no_tile():
    assert "prefix cache" not in names({})
