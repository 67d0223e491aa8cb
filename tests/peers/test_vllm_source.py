"""A run against vLLM, unmodified: the same report, its unseen accounts marked, and both sides count the same.

vLLM runs in an environment of its own, on a CPU:

    SOJOURN_VLLM_PYTHON=.../vllm/bin/python pytest -m peer tests/peers/test_vllm_source.py
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from bench.engines.servers import vllm_server
from sojourn.interop.sources.pressure import KV_USE, RUNNING
from sojourn.interop.sources.view import observe, timeline
from sojourn.metrics.ledger import ACCOUNTS
from sojourn.metrics.run.directory import RunDirectory

ROOT = Path(__file__).parents[2]
TINY_MODEL = ROOT / "scenarios" / "tiny-model"
PYTHON = os.environ.get("SOJOURN_VLLM_PYTHON")
REQUESTS, RATE_RPS, PROMPT_TOKENS, OUTPUT_TOKENS, SHARED_TOKENS = 48, 4.0, 192, 16, 160

pytestmark = [
    pytest.mark.peer,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON or not shutil.which(PYTHON), reason="SOJOURN_VLLM_PYTHON names no interpreter"),
]


@pytest.fixture(scope="module")
def against_vllm(tmp_path_factory) -> tuple[RunDirectory, str]:
    """(run directory, terminal output) of a short scenario."""
    folder = tmp_path_factory.mktemp("vllm")
    scenario = {
        "description": "short chats with a common beginning",
        "target": {"api": "completions", "usage": "continuous", "tokenizer": str(TINY_MODEL)},
        "arrivals": {"process": "poisson", "rate_rps": RATE_RPS, "count": REQUESTS},
        "workload": {
            "classes": [
                {"klass": "chat", "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "ignore_eos": True,
                 "shared_prefix_tokens": SHARED_TOKENS}
            ]
        },
        "objectives": [{"klass": "all", "ttft_ms": 2000, "tpot_ms": 500, "source": "none: agreement is of interest"}],
    }  # fmt: skip
    (folder / "chats.yaml").write_text(yaml.safe_dump(scenario))
    server = vllm_server("vllm", PYTHON, str(TINY_MODEL), max_model_len=1024)
    server.start()
    try:
        command = [
            sys.executable,
            "-m",
            "sojourn",
            "load",
            str(folder / "chats.yaml"),
            "--run-dir",
            str(folder / "run"),
        ]
        command += ["--base-url", f"http://127.0.0.1:{server.port}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    finally:
        server.stop()
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
    return RunDirectory.open(folder / "run"), done.stdout


def test_client_and_server_count_the_same_requests_and_tokens(against_vllm):
    run, output = against_vllm
    requests = run.requests()
    assert (requests.status == "ok").all() and len(requests) == REQUESTS
    view = observe(run, requests, requests)
    counts = {pair.what: (pair.client, pair.server) for pair in view.agreement}
    assert counts["finished requests"] == (REQUESTS, REQUESTS)
    assert counts["output tokens"] == (REQUESTS * OUTPUT_TOKENS, REQUESTS * OUTPUT_TOKENS)
    assert counts["prompt tokens"][0] == counts["prompt tokens"][1] > 0
    assert "Client and server agree" in output


def test_accounts_that_vllm_does_not_show_are_marked(against_vllm):
    run, output = against_vllm
    marks = {line.split()[0]: line for line in output.splitlines() if " seen" in line or " unseen" in line}
    assert {info.name for info in ACCOUNTS} <= set(marks)
    assert "not visible in vLLM's metrics" in marks["request.interference"] and "seen in part" in marks["request.queue"]
    diagnosis = json.loads((run.path / "diagnosis.json").read_text())
    assert "request.interference" not in diagnosis["ledger_share"] and diagnosis["server"]["title"] == "vLLM"


def test_spans_lie_within_the_latency_that_the_client_measured(against_vllm):
    run, _ = against_vllm
    requests = run.requests()
    view = observe(run, requests, requests)
    spans = {span.name: span for span in view.spans}
    assert set(spans) == {"queue", "prefill", "decode"} and all(s.requests == REQUESTS for s in spans.values())
    assert sum(span.share for span in view.spans) < 1
    assert 0 <= view.inside_ms <= view.server_ms and view.outside_ms > 0
    mean_ms = requests.e2e_ms.mean()
    assert sum(s.mean_ms for s in view.spans) + view.inside_ms + view.outside_ms == pytest.approx(mean_ms, rel=0.02)
    ttft = view.latencies["sojourn_request_ttft_seconds"]
    assert ttft.count == REQUESTS and ttft.mean * 1e3 < requests.ttft_ms.mean()
    tpot = view.latencies["sojourn_request_tpot_seconds"].mean * 1e3
    assert tpot == pytest.approx(requests.tpot_ms.mean(), rel=0.25)


def test_prefix_hits_gauges_and_scrapes_are_those_of_the_run(against_vllm):
    run, _ = against_vllm
    requests = run.requests()
    view = observe(run, requests, requests)
    # Only whole blocks are shared, and by the requests after the first one.
    block = int(view.reported_settings["block_size"])
    assert 0.3 * (SHARED_TOKENS // block * block) / PROMPT_TOKENS < view.hit_rate <= SHARED_TOKENS / PROMPT_TOKENS
    assert int(view.reported_settings["num_kv_blocks"]) > 0 and view.reported_settings["prefix_caching"] == "True"
    assert view.failed_scrapes == 0 and view.restarts == 0 and view.preemptions == 0
    assert view.scrapes >= REQUESTS / RATE_RPS / 2
    series = timeline(run)
    assert series[RUNNING].max() >= 1 and 0 < series[KV_USE].max() <= 1


def test_report_in_html_has_the_same_sections_and_marks(against_vllm):
    run, _ = against_vllm
    page = (run.path / "report.html").read_text(encoding="utf-8")
    for words in ("Where the time went", "What can be seen of this server", "What its own metrics showed", "Findings"):
        assert words in page
    assert "not visible in vLLM&#x27;s metrics" in page
