"""What a command line starts, where it will answer, and what may be written down of it."""

import shlex

import pytest

from sojourn.live.record.command_line import read_command, with_metrics, with_probe, without_secrets
from sojourn.metrics.errors import InputError


@pytest.mark.parametrize(
    ("line", "kind", "url"),
    [
        ("vllm serve m", "vllm", "http://127.0.0.1:8000"),
        ("/opt/v/bin/vllm serve m --port=9000 --host 0.0.0.0", "vllm", "http://127.0.0.1:9000"),
        ("python3 -m vllm.entrypoints.openai.api_server --model m --port 8001 --host ::1", "vllm", "http://[::1]:8001"),
        ("env A=b /x/vllm serve m --port 1 --port 2", "vllm", "http://127.0.0.1:2"),
        ("numactl -N 0 vllm serve m --host 10.0.0.7", "vllm", "http://10.0.0.7:8000"),
        ("python -m sglang.launch_server --model-path m", "sglang", "http://127.0.0.1:30000"),
        ("sglang serve --model-path m --port 3", "sglang", "http://127.0.0.1:3"),
        ("/usr/bin/llama-server -m m.gguf", "llama.cpp", "http://127.0.0.1:8080"),
        ("sojourn serve tiny-model --port 8123", "sojourn", "http://127.0.0.1:8123"),
    ],
)
def test_a_known_server_is_recognised_with_its_address(line, kind, url):
    found = read_command(shlex.split(line))
    assert found.kind is not None and (found.kind.name, found.url) == (kind, url)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no command"),
        ("vllm bench serve", "--base-url"),
        ("./start.sh", "--base-url"),
        ("vllm serve m --port x", "--base-url"),
    ],
)
def test_what_cannot_be_found_out_is_asked_for(line, says):
    with pytest.raises(InputError, match=says):
        read_command(shlex.split(line))


def test_an_address_that_is_named_stands():
    found = read_command(["./start.sh"], "http://10.0.0.7:9")
    assert found.kind is None and found.url == "http://10.0.0.7:9" and found.title == "start.sh"
    assert with_probe(with_metrics(found)) == found


def test_only_what_a_server_lacks_is_added():
    assert with_metrics(read_command(["llama-server"])).words == ("llama-server", "--metrics")
    asked = read_command(["sglang", "serve", "--enable-metrics"])
    assert with_metrics(asked) == asked == with_probe(asked)
    probed = with_probe(read_command(["vllm", "serve", "m"])).words
    assert probed[:3] == ("vllm", "serve", "m") and "--scheduler-cls" in probed and "--middleware" in probed
    with pytest.raises(InputError, match="--no-probe"):
        with_probe(read_command(["vllm", "serve", "m", "--scheduler-cls=own.Scheduler"]))


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("vllm serve m --api-key abc --port 1", "vllm serve m --api-key *** --port 1"),
        ("vllm serve m --api-key abc def --port 1", "vllm serve m --api-key *** *** --port 1"),
        ("vllm serve m --api-key=abc", "vllm serve m --api-key=***"),
        ("vllm serve m --hf-token abc", "vllm serve m --hf-token ***"),
        ("env HF_TOKEN=abc A=b vllm serve m", "env HF_TOKEN=*** A=b vllm serve m"),
        ("vllm serve m --ssl-keyfile-password abc", "vllm serve m --ssl-keyfile-password ***"),
        ("vllm serve m --max-num-batched-tokens 512", "vllm serve m --max-num-batched-tokens 512"),
        ("vllm serve --tokenizer t --max-num-batched-tokens=5", "vllm serve --tokenizer t --max-num-batched-tokens=5"),
    ],
)  # fmt: skip
def test_secrets_are_not_written_down(line, shown):
    assert without_secrets(shlex.split(line)) == shlex.split(shown)
