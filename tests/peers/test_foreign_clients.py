"""Foreign load generators, unmodified, run against our server and measure what our own client measures.

Each is found on the PATH (its own virtual environment's `bin` put there, last) and skipped where it is not:

    PATH="$PATH:.../guidellm/bin:.../aiperf/bin:.../lm-eval/bin:.../genai-bench/bin" pytest -m peer tests/peers
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import yaml

from sojourn.engine import LLM, SamplingParams
from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server_process import Running, serving

ROOT = Path(__file__).parents[2]
TINY_MODEL = ROOT / "scenarios" / "tiny-model"
REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 30, 64, 16

pytestmark = [pytest.mark.peer, pytest.mark.timeout(400)]


@dataclass
class Measured:
    """Medians over the requests of one run, milliseconds."""

    ttft_ms: float
    itl_ms: float


def run(name: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
    """Runs a tool of another environment, offline; skips where it is not installed."""
    if (program := shutil.which(name)) is None:
        pytest.skip(f"{name} is not on the PATH")
    offline = os.environ | {"HF_HUB_OFFLINE": "1"} | (environment or {})
    finished = subprocess.run([program, *arguments], env=offline, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, "tiny-model", "--run-dir", str(folder / "run")) as running:
        yield running, folder / "run"


def own_client(server: Running, folder: Path) -> Measured:
    """Our client with the same lengths, one request after another: far enough apart never to meet."""
    scenario = {
        "description": "one request at a time",
        "engine": {"model": "tiny-model"},
        "target": {"api": "completions", "usage": "continuous"},
        "arrivals": {"process": "constant", "rate_rps": 3, "duration_s": REQUESTS / 3},
        "workload": {
            "classes": [
                {"klass": "lone", "prompt_tokens": PROMPT_TOKENS, "output_tokens": OUTPUT_TOKENS, "ignore_eos": True}
            ]
        },
        "objectives": [{"klass": "all", "ttft_ms": 1000, "source": "none: only its measurements are of interest here"}],
    }
    (folder / "one-at-a-time.yaml").write_text(yaml.safe_dump(scenario))
    command = [sys.executable, "-m", "sojourn", "load", str(folder / "one-at-a-time.yaml")]
    command += ["--base-url", server.url, "--output", str(folder / "own")]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    requests = RunDirectory.open(folder / "own").requests()
    assert (requests.status == "ok").all() and (requests.output_tokens == OUTPUT_TOKENS).all()
    return _medians(requests.sent_ns, requests.first_token_ns, requests.last_byte_ns, requests.output_tokens)


def server_side(run_dir: Path, count: int) -> Measured:
    """What the server's own records say of its last `count` requests."""
    requests = RunDirectory.open(run_dir).table("requests").sort_values("arrived_ns").tail(count)
    assert (requests.finish_reason == "length").all() and (requests.output_tokens == OUTPUT_TOKENS).all()
    return _medians(requests.arrived_ns, requests.first_written_ns, requests.written_ns, requests.output_tokens)


def _medians(begin: pd.Series, first: pd.Series, last: pd.Series, tokens: pd.Series) -> Measured:
    return Measured(((first - begin) / 1e6).median(), ((last - first) / 1e6 / (tokens - 1)).median())


def agree(tool: Measured, server: Running, run_dir: Path, folder: Path) -> None:
    """The tool, and then our own client, against the server's records of the very requests that each of them sent.

    So both measure on one scale, whatever else the machine did in the minute between them.
    """
    for measure in (lambda: tool, lambda: own_client(server, folder)):
        client, recorded = measure(), server_side(run_dir, REQUESTS)
        assert abs(client.ttft_ms - recorded.ttft_ms) < 0.25 * recorded.ttft_ms + 5, (client, recorded)
        assert abs(client.itl_ms - recorded.itl_ms) < 0.2 * recorded.itl_ms + 0.5, (client, recorded)


def test_guidellm_completes_and_agrees(server, tmp_path):
    running, run_dir = server
    run(
        "guidellm", "run",
        "--backend", f"kind=openai_http,target={running.url},model=tiny-model",
        "--profile", "kind=concurrent,streams=1",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={TINY_MODEL}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        "--output", f"kind=json,path={tmp_path / 'guidellm.json'}",
        "--disable-progress",
    )  # fmt: skip
    result = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"][0]["metrics"]
    assert result["request_totals"]["successful"] == REQUESTS and not result["request_totals"]["errored"]
    tool = Measured(
        result["time_to_first_token_ms"]["successful"]["median"],
        result["inter_token_latency_ms"]["successful"]["median"],
    )
    agree(tool, running, run_dir, tmp_path)


def test_aiperf_completes_and_agrees(server, tmp_path):
    running, run_dir = server
    # Offline it takes a tokenizer from a hub's cache only.
    revision, cache = "0" * 40, tmp_path / "hub" / "models--local--tiny"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(revision)
    snapshot = cache / "snapshots" / revision
    snapshot.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TINY_MODEL / name, snapshot)
    run(
        "aiperf", "profile", "-m", "tiny-model", "--tokenizer", "local/tiny", "--endpoint-type", "chat", "--streaming",
        "-u", running.url, "--concurrency", "1", "--request-count", str(REQUESTS),
        "--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--synthetic-input-tokens-stddev", "0",
        "--output-tokens-mean", str(OUTPUT_TOKENS), "--output-tokens-stddev", "0",
        "--extra-inputs", "ignore_eos:true", "--ui", "none", "--output-artifact-dir", str(tmp_path / "out"),
        environment={"HF_HOME": str(tmp_path)},
    )  # fmt: skip
    result = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert result["request_count"]["avg"] == REQUESTS and "error_request_count" not in result
    tool = Measured(result["time_to_first_token"]["p50"], result["inter_token_latency"]["p50"])
    agree(tool, running, run_dir, tmp_path)


def test_genai_bench_completes(server, tmp_path):
    running, _ = server
    run(
        "genai-bench", "benchmark", "--api-backend", "vllm", "--api-base", running.url, "--api-key", "x",
        "--api-model-name", "tiny-model", "--model-tokenizer", str(TINY_MODEL), "--task", "text-to-text",
        "--traffic-scenario", f"D({PROMPT_TOKENS},{OUTPUT_TOKENS})", "--num-concurrency", "1",
        "--max-time-per-run", "1", "--max-requests-per-run", "6", "--server-engine", "vLLM",
        "--experiment-base-dir", str(tmp_path / "out"), "--log-dir", str(tmp_path / "log"),
    )  # fmt: skip
    (result,) = (tmp_path / "out").glob("*/D*_time_1s.json")
    measured = json.loads(result.read_text())["aggregated_metrics"]
    assert measured["num_completed_requests"] >= 6 and measured["num_error_requests"] == 0


def test_lm_eval_finds_the_answers_that_the_offline_engine_finds(server, tmp_path):
    running, _ = server
    tasks = [
        ("A list is", [" a sequence", " blue water"]),
        ("The function returns", [" purple sky", " the value"]),
        ("Return a new", [" object", " fish"]),
    ]
    docs = [{"q": question, "choices": choices, "a": 0} for question, choices in tasks]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": "toy",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "docs.jsonl")}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{a}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    }
    (tmp_path / "toy.yaml").write_text(yaml.safe_dump(task))
    model = f"model=tiny-model,base_url={running.url}/v1/completions,tokenizer_backend=huggingface"
    run(
        "lm_eval", "run", "--model", "local-completions",
        "--model_args", f"{model},tokenizer={TINY_MODEL},num_concurrent=2,max_retries=1,tokenized_requests=False",
        "--tasks", "toy", "--include_path", str(tmp_path), "--log_samples", "--output_path", str(tmp_path / "out"),
        environment={"HF_HOME": str(tmp_path)},
    )  # fmt: skip
    (samples,) = (tmp_path / "out").rglob("samples_toy_*.jsonl")
    scored = {}
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        scored[sample["doc"]["q"]] = [float(response[0][0]) for response in sample["resps"]]
    with LLM("tiny-model", threads=1, num_kv_blocks=64, max_model_len=256) as llm:
        for question, choices in tasks:
            assert scored[question] == pytest.approx([_log_likelihood(llm, question, c) for c in choices], abs=1e-3)


def _log_likelihood(llm: LLM, context: str, continuation: str) -> float:
    """Of the continuation's tokens, as they stand in the whole text."""
    scoring = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (whole,) = llm.generate(context + continuation, scoring)
    (alone,) = llm.generate(context, scoring)
    continued = len(whole.prompt_token_ids) - len(alone.prompt_token_ids)
    return sum(entry.logprob for entry in whole.prompt_logprobs[-continued:])
