"""The words of `sojourn server fleet replay`, and what it prints."""

import json

import pytest
from typer.testing import CliRunner

from sojourn.commands.program import app
from tests.replay.simulated_run import random_asks, write_run

TRACE = ["--trace", "mooncake_conversation_trace.jsonl", "--block-tokens", "8", "--output-scale", "0.02"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "base"
    return str(write_run(folder, random_asks(1, 60), num_blocks=4096, max_num_batched_tokens=256).path)


def call(run: str, *words: str):
    return CliRunner().invoke(app, ["server", "fleet", "replay", run, *TRACE, *words])


def test_each_routing_policy_gets_a_row_and_an_answer(run):
    shown = call(run, "--replicas", "3", "--requests", "300")
    assert shown.exit_code == 0, shown.output
    for name in ("round-robin", "least-requests", "consistent-hash", "prefix-aware"):
        assert name in shown.output
    assert max(map(len, shown.output.splitlines()[:6])) <= 80
    found = json.loads(call(run, "--requests", "300", "--rate", "50", "--routing", "prefix-aware", "--json").output)
    (answer,) = found["answers"]
    assert answer["rate_rps"] == 50 and answer["requests"] == 300 and answer["replicas"] == 2
    assert 0 < answer["hit_rate"] <= answer["pooled_hit_rate"] and answer["ttft_ms"]["p50"] > 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--routing", "random"], "'random' is not known; give some of round-robin"),
        (["--routing", "round-robin,round-robin"], "each policy once"),
        (["--set", "max_num_seqs=2,4"], "one value a key"),
        (["--set", "replicas=4"], "an option of its own"),
        (["--set", "overlap=on"], "does not overlap steps"),
        (["--trace", "nothing.csv"], "neither a file nor a bundled trace"),
        (["--trace", "AzureLLMInferenceTrace_conv.csv"], "names no blocks"),
    ],
)
def test_what_cannot_be_replayed_gets_a_sentence(run, words, complaint):
    shown = call(run, *words)
    assert shown.exit_code != 0
    assert complaint in str(shown.exception or shown.output)
