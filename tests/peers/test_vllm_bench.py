"""`vllm bench serve` itself beside `sojourn bench-serve`, with the same flags against the same reference server.

SOJOURN_VLLM_PYTHON=.../vllm/bin/python pytest -m peer tests/peers/test_vllm_bench.py
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.load_generators.accuracy import VLLM_BENCH
from sojourn.loadgen.target.processes import free_port
from tests.interop.exported.test_vllm_result import OURS, VLLM_KEYS

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SOJOURN_VLLM_PYTHON")
LARGEST_DIFFERENCE = 0.2  # of a mean over 60 requests that take 350 ms each, on a machine that does other work too

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PYTHON or not shutil.which(PYTHON), reason="SOJOURN_VLLM_PYTHON names no interpreter"),
]


def test_same_flags_give_the_same_keys_and_like_figures(tmp_path):
    port = free_port()
    flags = [
        "--backend", "openai", "--base-url", f"http://127.0.0.1:{port}", "--model", "reference", "--tokenizer",
        str(ROOT / "scenarios" / "tiny-model"), "--dataset-name", "random", "--random-input-len", "32",
        "--random-output-len", "16", "--num-prompts", "60", "--request-rate", "10", "--goodput", "ttft:500",
        "--save-result", "--save-detailed", "--disable-tqdm", "--result-dir", str(tmp_path),
    ]  # fmt: skip
    timing = json.dumps({"ttft_s": 0.05, "token_s": 0.02})
    server = subprocess.Popen(
        [sys.executable, "-m", "sojourn.loadgen.reference_server.server", timing, "--port", str(port)], cwd=ROOT
    )
    foreign = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    try:
        ours = [sys.executable, "-m", "sojourn", "bench-serve", *flags, "--run-dir", str(tmp_path / "run")]
        subprocess.run([*ours, "--result-filename", "ours.json"], cwd=ROOT, check=True, timeout=120)
        theirs = [PYTHON, "-c", VLLM_BENCH, *flags, "--result-filename", "theirs.json"]
        subprocess.run(theirs, cwd=tmp_path, env=foreign, check=True, timeout=300)
    finally:
        server.terminate()
        server.wait(timeout=10)
    mine, vllms = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("ours", "theirs"))
    assert set(vllms) == VLLM_KEYS and set(mine) == VLLM_KEYS | OURS
    for key in VLLM_KEYS - {"label", "generated_texts"}:
        if mine[key] is not None and vllms[key] is not None:
            assert isinstance(mine[key], type(vllms[key])), key
    assert (mine["completed"], mine["total_output_tokens"]) == (vllms["completed"], vllms["total_output_tokens"])
    assert list(map(len, mine["itls"])) == list(map(len, vllms["itls"]))
    for key in ("mean_ttft_ms", "mean_tpot_ms", "mean_itl_ms", "median_itl_ms"):
        assert mine[key] == pytest.approx(vllms[key], rel=LARGEST_DIFFERENCE), key
