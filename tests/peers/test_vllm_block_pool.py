"""The probe on vLLM's own block pool, without a server: hits, causes of misses and evictors against our engine's index.

SOJOURN_VLLM_PYTHON=.../vllm/bin/python pytest -m peer tests/peers/test_vllm_block_pool.py
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from sojourn.interop.probe.folder import import_probe
from sojourn.live.kv_lens.of_run import lens_of_run
from tests.probe.test_blocks import by_our_engine, conversations, prompts

PYTHON = os.environ.get("SOJOURN_VLLM_PYTHON")
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON or not shutil.which(PYTHON), reason="SOJOURN_VLLM_PYTHON names no interpreter"),
]


def served(folder: Path, texts: list[list[int]], blocks: int, caches: bool = True) -> list[int]:
    """Tokens that vLLM found of each prompt."""
    (folder / "prompts.json").write_text(json.dumps(texts))
    script = Path(__file__).with_name("vllm_block_pool.py")
    done = subprocess.run(
        [PYTHON, script, folder / "prompts.json", str(blocks), str(caches)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "probe"), "SOJOURN_PROBE": str(folder / "probe")}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(folder: Path, count: int) -> pd.DataFrame:
    rows = import_probe(folder / "probe").table("requests").set_index("request_id")
    return rows.loc[[f"cmpl-r{number}-0-{number:08x}" for number in range(count)]]


@pytest.mark.parametrize("caches", [True, False], ids=["cache", "no-cache"])
def test_miss_columns_are_those_of_our_engine(tmp_path, caches):
    texts = [text for text in conversations(1) if len(text) < 400]
    hits = served(tmp_path, texts, 4000, caches)
    ours, rows = by_our_engine(texts, 4000, 4, caches=caches), rows_of(tmp_path, len(texts))
    for number, (row, report) in enumerate(zip(rows.itertuples(), ours, strict=True)):
        assert row.prefix_outcomes == report.prefix_outcomes, number
        assert row.infinite_hit_tokens == report.infinite_hit_tokens, number
        assert row.prefix_shared_tokens == report.prefix_shared_tokens, number
        assert (None if pd.isna(row.diverged_at) else row.diverged_at) == report.diverged_at, number
    assert rows.prefix_outcomes.map(lambda cell: cell.get("hit", 0)).tolist() == hits
    assert any("miss_diverged" in cell for cell in rows.prefix_outcomes)


def test_evictions_are_those_of_the_pool(tmp_path):
    texts = prompts(2, count=150, beginnings=14)
    hits = served(tmp_path, texts, 25)  # one of which vLLM keeps for itself
    rows = rows_of(tmp_path, len(texts))
    assert rows.cached_tokens.tolist() == hits
    evicted = rows.prefix_outcomes.map(lambda cell: cell.get("miss_evicted", 0))
    assert evicted.sum() > 500 and (rows.infinite_hit_tokens == rows.cached_tokens + evicted).all()
    assert (rows.evicted_by.map(lambda cell: sum(cell.values())) <= evicted).all()
    assert rows[evicted > 0].evicted_by.map(bool).all() and (rows.evicted_ago_ns[evicted > 0] > 0).all()
    lens = lens_of_run(import_probe(tmp_path / "probe"))
    assert lens.pool_blocks == 24 and abs(lens.curve_error) < 0.01 and not lens.warnings
    pool = lens.pools[0]
    assert 20 < pool.held <= 24 and pool.stored - pool.removed == pool.held and pool.removed_unknown == 0


@pytest.mark.parametrize("ratio", [0.5, 2, 4])
def test_the_curve_is_what_pools_of_those_sizes_hit(tmp_path, ratio):
    texts, blocks = prompts(2, count=150, beginnings=14), 30
    (tmp_path / "other").mkdir()
    served(tmp_path, texts, blocks + 1)
    lens = lens_of_run(import_probe(tmp_path / "probe"))
    real = sum(served(tmp_path / "other", texts, int(ratio * blocks) + 1)) / sum(map(len, texts))
    (point,) = (point for point in lens.curve if point.ratio == ratio)
    assert point.hit_rate == pytest.approx(real, abs=0.01)
