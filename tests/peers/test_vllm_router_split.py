"""vLLM's router in its prefill/decode mode, in front of a prefill and a decode server of ours.

SOJOURN_VLLM_ROUTER_PYTHON names the python of an environment with vllm-router.
"""

import contextlib
import os
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.engine.server_process import Running, serving

PYTHON = os.environ.get("SOJOURN_VLLM_ROUTER_PYTHON")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(PYTHON is None, reason="SOJOURN_VLLM_ROUTER_PYTHON names no python with vllm-router"),
]
TASK = "def fibonacci(n):\n    if n < 2:\n        return n\n" * 10


@contextlib.contextmanager
def routed(prefill: Running, decode: Running, folder: Path, connector: str):
    """The address of the router, once it is up."""
    with socket.socket() as probe, socket.socket() as other:
        probe.bind(("127.0.0.1", 0))
        other.bind(("127.0.0.1", 0))
        port, metrics = probe.getsockname()[1], other.getsockname()[1]
    bootstrap = [prefill.url.rpartition(":")[2]] if connector == "mooncake" else []
    command = [
        str(Path(PYTHON).parent / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", connector,
        "--prefill", prefill.url, *bootstrap, "--decode", decode.url, "--host", "127.0.0.1", "--port", str(port),
        "--prometheus-port", str(metrics), "--policy", "round_robin",
    ]  # fmt: skip
    with (folder / "router.log").open("wb") as log:
        router = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            assert router.poll() is None, (folder / "router.log").read_text()
            time.sleep(0.1)
        yield url
    finally:
        router.terminate()
        router.wait(20)


@pytest.mark.parametrize("connector", ["nixl", "mooncake"])
def test_a_call_through_the_router_is_computed_on_both_servers(tmp_path, connector):
    role = ("--kv-host-gib", "0.05", "--kv-role")
    with (
        serving(tmp_path, "tiny-model", *role, "prefill") as prefill,
        serving(tmp_path, "tiny-model", *role, "decode") as decode,
        routed(prefill, decode, tmp_path, connector) as url,
    ):
        for path, body in (
            ("/v1/completions", {"prompt": TASK}),
            ("/v1/completions", {"prompt": f"# {TASK}", "stream": True}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": TASK}]}),
        ):
            body = {"model": "tiny-model", "temperature": 0, "max_tokens": 12} | body
            before = peer_tokens(decode)
            split = httpx.post(url + path, json=body, timeout=30)
            alone = httpx.post(prefill.url + path, json=body, timeout=30)
            assert split.status_code == 200 and texts(split) == texts(alone)
            assert peer_tokens(decode) > before, "the decode server has computed the prompt itself"


def texts(answer: httpx.Response) -> list[str]:
    """Of the whole answer, or of the chunks of a stream."""
    if not answer.text.startswith("data:"):
        choice = answer.json()["choices"][0]
        return [choice.get("text") or choice["message"]["content"]]
    return [line.partition('"text":')[2].partition(',"logprobs"')[0] for line in answer.text.splitlines() if line]


def peer_tokens(server: Running) -> float:
    page = httpx.get(f"{server.url}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if 'outcome="hit_peer"' in line)
