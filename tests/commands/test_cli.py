"""The command line: every expected failure is a sentence on stderr, an exit code, and nothing half-written."""

import subprocess
import sys
from pathlib import Path

import pytest

from sojourn.metrics.ledger import LIFECYCLES
from sojourn.metrics.memory.plan import PURPOSES
from tests.commands.program import run_program

pytestmark = pytest.mark.server

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["run", "nothing"], 2, ["'nothing'", "bundled are", "demo"]),
        (["run", "broken.yaml"], 2, ["broken.yaml", "arrivals.rate_rps", "-1"]),
        (["run", "notyaml.yaml"], 2, ["notyaml.yaml", "line"]),
        (["run", "demo", "--set", "num_kv_block=4"], 2, ["num_kv_block", "did you mean num_kv_blocks"]),
        (["run", "demo", "--set", "num_kv_blocks=0"], 2, ["num_kv_blocks", "0", "greater than or equal to 1"]),
        (["run", "demo", "--set", "block_size"], 2, ["KEY=VALUE"]),
        (["load", "demo", "--base-url", "http://127.0.0.1:9"], 1, ["http://127.0.0.1:9", "sojourn serve"]),
        (["load", "settings.yaml", "--base-url", "http://127.0.0.1:9"], 2, ["max_seqs", "did you mean max_num_seqs"]),
        (["load", "demo", "--base-url", "not a url"], 2, ["not a url"]),
        (["capacity", "demo", "--rates", "1,2"], 2, ["arrivals.process is trace", "no rate_rps"]),
        (["capacity", "steady-chat", "--points", "3"], 2, ["--rates 1,2,4,8"]),
        (["capacity", "steady-chat", "--rates", "1,2", "--points", "3"], 2, ["--points", "drop one"]),
        (["capacity", "steady-chat", "--rates", "1", "--model", "x"], 2, ["--model x", "--base-url"]),
        (
            ["capacity", "steady-chat", "--rates", "1", "--set", "dtype=x", "--base-url", "http://a"],
            2,
            ["--set", "drop"],
        ),
        (["capacity", "steady-chat", "--rates", "1", "--start", "2"], 2, ["--rate 2", "--rates"]),
        (["capacity", "steady-chat", "--slo", "itl:5"], 2, ["--slo", "itl:5", "ttft, ttfa, tpot or e2e"]),
        (["capacity", "steady-chat", "--start", "8", "--highest", "4"], 2, ["--rate 8", "--highest 4"]),
        (["compare", "absent", "absent"], 2, ["absent", "not a folder"]),
        (["compare", ".", ".", "--margin", "-5%"], 2, ["--margin is -5%"]),
        (["compare", ".", ".", "--margin", "3%", "--margin", "4%"], 2, ["one is given twice"]),
        (["compare", ".", ".", "--margin", "e2e_mean=x%"], 2, ["--margin is x%"]),
        (["compare", ".", "."], 2, ["neither a run directory nor a folder of some"]),
        (["diagnose", "absent"], 1, ["absent", "not a folder"]),
        (["diagnose", "."], 1, ["run.json"]),
        (["report", "absent"], 1, ["absent"]),
        (["export", "absent", "--to", "perfetto"], 1, ["absent", "not a folder"]),
        (["export", "absent", "--to", "perfetto", "--from", "3", "--until", "2.5"], 2, ["--until 2.5", "--from 3"]),
        (["export", "absent", "--from", "3"], 2, ["--to perfetto"]),
        (["export", "absent", "--to", "html", "--detailed"], 2, ["--to vllm"]),
        (["join", "absent"], 2, ["--receive"]),
        (["join", "absent", ".", "--json"], 1, ["absent"]),
        (["join", "--receive", "a", "b"], 2, ["one file to write"]),
        (["ui", "absent"], 1, ["absent"]),
        (["ui", "kept"], 2, ["kept is a folder of runs", "--runs kept"]),
        (["serve", "tiny-model", "--port", "70000"], 2, ["port", "70000", "65535"]),
        (["serve", "tiny-model", "--dtype", "float8"], 2, ["float8", "bfloat16"]),
        (
            ["serve", "tiny-model", "--priority-ageing", "5"],
            2,
            ["priority_ageing=5 is not valid: only policy=priority"],
        ),
        (["serve", "nowhere"], 1, ["nowhere", "does not exist"]),
        (["serve", "tiny-model", "--check", "--num-kv-blocks", "99999999"], 1, ["does not fit", "KV cache 6103"]),
        (["serve", "tiny-model", "--check", "--run-dir", "broken.yaml/run"], 1, ["broken.yaml", "--run-dir"]),
        (["server", "dashboards", "--output", "broken.yaml"], 2, ["broken.yaml", "folder"]),
        (["dev", "bench", "offline", "nowhere"], 2, ["nowhere", "qwen3-14b"]),
        (["calibrate", "device", "--device", "tpu"], 2, ["tpu", "cuda"]),
        (["nonsense"], 2, ["nonsense"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_wrong_use_is_explained_and_leaves_nothing(tmp_path, arguments, code, says):
    (tmp_path / "broken.yaml").write_text(
        "description: x\nengine: {model: tiny-model}\ntarget: {api: chat}\n"
        "arrivals: {process: poisson, rate_rps: -1, duration_s: 5}\n"
        "workload: {classes: [{klass: a, prompt_tokens: 5, output_tokens: 5}]}\n"
        "objectives: [{klass: all, ttft_ms: 500, source: none}]\n"
    )
    settings = (tmp_path / "broken.yaml").read_text().replace("rate_rps: -1", "rate_rps: 1")
    (tmp_path / "settings.yaml").write_text(settings.replace("tiny-model}", "tiny-model, max_seqs: 4}"))
    (tmp_path / "notyaml.yaml").write_text("a: [1, 2\nb: }")
    (tmp_path / "kept" / "one").mkdir(parents=True)
    (tmp_path / "kept" / "one" / "run.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    done = run_program(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert all(word in done.stderr for word in says), done.stderr
    assert "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("arguments", "code"), [(["nonsense"], 2), (["diagnose", "absent"], 1), (["-h"], 0)])
def test_program_of_its_own_ends_with_the_same_codes(arguments, code):
    done = subprocess.run([sys.executable, "-m", "sojourn", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr


def test_every_setting_of_the_engine_is_an_option_of_serve():
    from sojourn.engine.config import EngineConfig

    done = subprocess.run(
        [sys.executable, "-m", "sojourn", "serve", "--help"], cwd=ROOT, capture_output=True, text=True,
        env={"COLUMNS": "80", "PATH": "/usr/bin"},
    )  # fmt: skip
    for name in EngineConfig.model_fields:
        option = "--lora" if name == "lora_adapters" else f"--{name.replace('_', '-')}"  # as vLLM's users know it
        assert name == "model" or option in done.stdout, name
    assert "fcfs, priority, shortest-prefill-first" in " ".join(done.stdout.replace("│", " ").split())


def test_a_checked_server_shows_its_memory_plan_and_serves_nothing():
    done = run_program("serve", "tiny-model", "--check", "--kv-cache-gib", "0.5")
    assert done.returncode == 0, done.stderr
    for purpose in PURPOSES:
        assert purpose in done.stdout
    assert "KV cache          512 MiB" in done.stdout and "8,192 KV blocks hold 131,072 tokens" in done.stdout
    assert "listens" not in done.stdout
    assert "get temperature=0.7, top_k=40 of generation_config.json" in " ".join(done.stdout.split())


def test_dashboards_are_written_where_asked(tmp_path):
    done = run_program("server", "dashboards", "--output", str(tmp_path / "out"))
    assert done.returncode == 0
    names = {path.stem for path in (tmp_path / "out").glob("sojourn-*.json")}
    assert names == {f"sojourn-{name}" for name in (*LIFECYCLES, "fleet", "saturation", "drilldown")}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("sojourn", {"numpy", "pandas", "pyarrow", "plotly", "torch", "locust"}),  # for --help
        ("sojourn.engine.server.serve", {"pandas", "plotly", "torch", "transformers", "locust"}),  # the front
    ],
)
def test_start_loads_no_package_that_only_others_need(module, heavy):
    code = f"import {module}, sys; print({heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr
