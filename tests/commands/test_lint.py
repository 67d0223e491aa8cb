"""`sojourn lint` over bundled scenarios, planted ones, traces and runs."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from sojourn.metrics.errors import InputError
from sojourn.metrics.records import RequestRecord
from sojourn.metrics.records.tables import row
from sojourn.metrics.run.directory import RunDirectory
from sojourn.metrics.run.segments import write_segment

RUN = {"scenario": "x", "seed": 1, "engine": {}, "hardware": {}, "versions": {}, "wall_anchor": {}, "objectives": [],
       "client_error": {}, "valid": True}  # fmt: skip

PLANTED = """
description: one thing is wrong
objectives: [{klass: all, ttft_ms: 500, source: this test}]
target: {api: chat}
arrivals: {process: poisson, rate_rps: 5, duration_s: 4}
workload:
  classes:
    - klass: assistant
      prompt_tokens: {distribution: uniform, min_tokens: 300, max_tokens: 301}
      output_tokens: {distribution: uniform, min_tokens: 8, max_tokens: 9}
      shared_prefix_tokens: 240
      SHARED
"""


def lint(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["lint", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def found(report: dict) -> list[str]:
    return [finding["key"] for finding in report["findings"]]


@pytest.fixture
def planted(tmp_path) -> Path:
    path = tmp_path / "planted.yaml"
    path.write_text(PLANTED.replace("SHARED", "shared_part: last"))
    return path


def test_a_changing_part_that_stands_first_is_found_and_strict_says_so(planted):
    report = lint(str(planted))
    assert found(report)[0] == "prompt_order"
    assert report["findings"][0]["share"] > 0.5
    assert CliRunner().invoke(app, ["lint", str(planted), "--strict"]).exit_code == 1
    planted.write_text(PLANTED.replace("SHARED", ""))
    assert lint(str(planted))["findings"] == []
    assert CliRunner().invoke(app, ["lint", str(planted), "--strict"]).exit_code == 0


@pytest.mark.parametrize("name", ["sessions", "shared-system-prompt", "mooncake"])
def test_bundled_scenarios_that_share_prefixes_waste_none(name):
    report = lint(name, "--requests", "30")
    assert found(report) == []
    assert all(each["texts"] for each in report["classes"])


def test_a_trace_of_blocks_says_what_its_prompts_share_and_what_it_cannot():
    report = lint("mooncake_conversation_trace.jsonl", "--requests", "300")
    (klass,) = report["classes"]
    assert report["block_size"] == 512 and klass["common_prefix_tokens"] == 512
    assert 0.05 < klass["infinite_share"] < 0.2 and klass["movable_share"] is None
    assert "below a block" in report["notes"][0]


def test_a_trace_of_lengths_says_that_nothing_can_be_known():
    report = lint("AzureLLMInferenceTrace_conv.csv", "--requests", "50")
    assert report["classes"][0]["requests"] == 50 and report["classes"][0]["infinite_share"] is None
    assert "lengths only" in report["notes"][0] and report["findings"] == []


def test_a_trace_with_text_is_read_like_prompts(tmp_path):
    trace = tmp_path / "texts.jsonl"
    rules = " ".join(f"Rule {number}: answer in short sentences about harbours." for number in range(30))
    lines = [{"prompt": f"Request {number * 7919} of day {number}. {rules}"} for number in range(8)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    report = lint(str(trace))
    assert found(report)[0] == "prompt_order" and "--model" in report["notes"][0]


def test_a_run_tells_what_its_prompts_shared_in_time_too(tmp_path):
    RunDirectory.create(tmp_path, RUN)
    records = [
        RequestRecord(f"r{number}", 0, 1, klass="chat", prompt_tokens=100, prompt_characters=400, repeated_tokens=80,
                      movable_tokens=80, prefix_outcomes={"miss_cold": 100}, prefix_shared_tokens=2)
        for number in range(5)
    ]  # fmt: skip
    write_segment(tmp_path, "requests", [row(record) for record in records], "0")
    report = lint(str(tmp_path))
    assert found(report) == ["prompt_order"]
    assert report["classes"][0]["texts"][0]["characters"] == 2000


def test_wrong_use_is_told(tmp_path, planted):
    for arguments, says in (
        (["no-such-thing"], "neither a file nor a bundled trace"),
        ([str(planted), "--model", "nowhere"], "'nowhere'"),
    ):
        result = CliRunner().invoke(app, ["lint", *arguments])
        assert result.exit_code != 0 and says in str(result.exception)
    RunDirectory.create(tmp_path, RUN)
    assert "no server recorded" in str(CliRunner().invoke(app, ["lint", str(tmp_path)]).exception)
    for target, option in (
        (str(tmp_path), "--seed"), (str(tmp_path), "--requests"), ("AzureLLMInferenceTrace_conv.csv", "--seed"),
        ("mooncake_conversation_trace.jsonl", "--block-size"),
    ):  # fmt: skip
        assert f"leave {option} out" in str(CliRunner().invoke(app, ["lint", target, option, "3"]).exception)


def test_a_dashboard_is_judged_by_a_page(tmp_path):
    board, page = tmp_path / "board.json", tmp_path / "page.txt"
    board.write_text(json.dumps({"panels": [{"title": "KV", "targets": [{"expr": "vllm:gpu_cache_usage_perc"}]}]}))
    page.write_text("# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc 0.5\n")
    report = lint(str(board), "--metrics", str(page))
    [finding] = report["findings"]
    assert finding["owners"] == ['panel "KV"'] and "vllm:kv_cache_usage_perc" in finding["fix"]
    shown = CliRunner().invoke(app, ["lint", str(board), "--metrics", str(page), "--strict"])
    assert shown.exit_code == 1 and "0 of 1 queries" in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["board.json"], "--metrics"), (["board.json", "--metrics", "none"], "none cannot be read"),
        (["board.json", "--metrics", "board.json"], "no page of /metrics"),
        (["board.json", "--metrics", "page.txt", "--seed", "3"], "leave --seed out"),
        (["page.txt", "--metrics", "page.txt"], "no query"), (["steady-chat", "page.txt"], "one too many"),
    ],
)  # fmt: skip
def test_what_cannot_be_judged_says_what_to_give(tmp_path, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    Path("board.json").write_text('{"panels": [{"targets": [{"expr": "up"}]}]}')
    Path("page.txt").write_text("vllm:num_requests_running 1\n")
    shown = CliRunner().invoke(app, ["lint", *arguments])
    assert isinstance(shown.exception, InputError) and says in str(shown.exception)
