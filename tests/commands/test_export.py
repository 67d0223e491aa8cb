"""`sojourn export` and `sojourn bench-serve` on the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sojourn.commands.export import vllm_document
from sojourn.commands.vllm_table import vllm_table
from tests.interop.exported.test_vllm_result import VLLM_KEYS
from tests.loadgen.scripted_server import Script, ScriptedServer
from tests.metrics.synthetic import synthetic_run

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]


def test_the_table_of_bench_serve_has_the_figures_of_its_file(tmp_path):
    """What stands on the screen stands in the document, and few requests are named."""
    run = synthetic_run(tmp_path / "run", requests=60)
    document = vllm_document(run)
    rows = {name: (value, note) for name, value, note in vllm_table(document, percentiles=(50.0, 99.0))}
    assert rows["Output token throughput (tok/s)"][0] == f"{document['output_throughput']:,.2f}"
    for word, key in (("Mean", "mean"), ("Median", "median"), ("P99", "p99")):
        assert rows[f"{word} TTFT (ms)"][0] == f"{document[f'{key}_ttft_ms']:,.2f}"
    assert rows["P99 ITL (ms)"][1] == "of few requests: 662 are needed" and rows["P50 TTFT (ms)"][1] == ""
    assert rows["Time to First Token"] == ("", "")


def sojourn(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "sojourn", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_run_is_exported_with_vllms_keys(tmp_path):
    run = synthetic_run(tmp_path / "run", requests=20)
    done = sojourn("export", str(run.path), "--to", "vllm")
    assert done.returncode == 0, done.stderr
    written = json.loads((run.path / "vllm_result.json").read_text())
    assert written["completed"] == 20 and set(written) >= VLLM_KEYS


def test_flag_that_cannot_be_honoured_ends_with_a_sentence_and_code_2():
    done = sojourn("bench-serve", "--dataset-name", "random", "--lora-modules", "a")
    assert done.returncode == 2 and "`--lora-modules` of vllm bench serve cannot be honoured here" in done.stderr


@pytest.mark.slow
def test_flags_of_vllm_make_a_run_with_its_scenario_and_the_result_file(tmp_path):
    server = ScriptedServer(Script()).start()
    done = sojourn(
        "bench-serve", "--base-url", server.url, "--dataset-name", "random", "--isl", "20", "--osl", "4",
        "--num-prompts", "12", "--request-rate", "40", "--goodput", "ttft:500", "--save-result", "--result-filename",
        "r.json", "--result-dir", str(tmp_path), "--metadata", "tp=2", "--run-dir", str(tmp_path / "run"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "r.json").read_text())
    assert (written["completed"], written["tp"], written["request_rate"]) == (12, "2", 40.0)
    assert "ttfts" not in written and written["goodput_slos_ms"] == {"ttft": 500.0}
    meta = json.loads((tmp_path / "run" / "run.json").read_text())
    assert meta["command"][:3] == ["sojourn", "load", str(tmp_path / "run" / "scenario.yaml")]
    assert (tmp_path / "run" / "scenario.yaml").is_file()
