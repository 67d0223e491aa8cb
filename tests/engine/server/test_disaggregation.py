"""A prefill and a decode server, and a proxy that speaks as vLLM's example does: handoff, refusals, a dead server."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from tests.engine.closure import open_books, rows_of
from tests.engine.server_process import Running, post, serving, wait_for

pytestmark = pytest.mark.server

TASK = "def fibonacci(n):\n    if n < 2:\n        return n\n" * 12
PROMPT = f"Explain:\n{TASK}"
NOTHING = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False} | NOTHING


def call(server: Running, path: str = "/v1/completions", request_id: str = "r", **body: Any) -> dict[str, Any]:
    url, headers = f"{server.url}{path}", {"x-request-id": request_id}
    answer = httpx.post(url, json={"model": "tiny-model", "temperature": 0} | body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.json()


def prefilled(server: Running, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    """The first half of what a proxy does: the object for the decode server."""
    one = {"stream": False, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
    return call(server, path, **body | one)["kv_transfer_params"]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    options, small = ("--kv-host-gib", "0.05", "--run-dir"), ("--max-num-batched-tokens", "64")
    with (
        serving(folder, "tiny-model", "--kv-role", "prefill", *small, *options, str(folder / "p")) as prefill,
        serving(folder, "tiny-model", "--kv-role", "decode", *options, str(folder / "d")) as decode,
    ):
        yield prefill, decode, folder


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TASK}]}),
    ],
)
def test_a_proxied_call_answers_as_one_server_and_its_books_close(servers, path, body):
    prefill, decode, folder = servers
    params = prefilled(prefill, path, **body)
    assert set(params) >= {"remote_request_id", "tp_size", "remote_num_tokens", *NOTHING}
    blocks = params["remote_block_ids"][0]
    assert params["do_remote_prefill"] and not params["do_remote_decode"] and len(blocks) > 5
    name = f"split{path.replace('/', '-')}"
    split = call(decode, path, name, max_tokens=12, kv_transfer_params=params, **body)
    alone = call(prefill, path, max_tokens=12, **body)
    choice, expected = split["choices"][0], alone["choices"][0]
    assert choice.get("text", choice.get("message")) == expected.get("text", expected.get("message"))
    (row,) = rows_of(folder / "d", [name])
    assert not open_books(row) and row["ledger_memory_transfer_ns"] > 0 and row["transfer_bytes"] > 0
    assert dict(row["prefix_outcomes"])["hit_peer"] == dict(row["loaded_tokens"])["peer"] >= 16 * len(blocks) - 16


@pytest.mark.parametrize("gap_seconds", [0.0, 0.3])
def test_calls_that_are_sent_at_once_answer_as_one_server_and_their_books_close(servers, gap_seconds):
    """As llm-d's sidecar and vLLM's example proxy do it for MooncakeConnector; with a gap the decode call waits for its
    prefill call to come."""
    prefill, decode, folder = servers
    prompt, name = f"At once, {gap_seconds}: {PROMPT}", f"overlapped-{gap_seconds}"
    (engine,) = httpx.get(f"{prefill.url}/query").json().values()
    one = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE | {"transfer_id": name}}
    source = {"do_remote_decode": False, "do_remote_prefill": True, "transfer_id": name,
              "remote_bootstrap_addr": prefill.url, "remote_engine_id": engine["engine_id"]}  # fmt: skip
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(call, decode, "/v1/completions", name, prompt=prompt, max_tokens=12,
                             kv_transfer_params=source)  # fmt: skip
        time.sleep(gap_seconds)
        call(prefill, "/v1/completions", name, **one)
    alone = call(prefill, prompt=prompt, max_tokens=12)
    assert answer.result()["choices"][0]["text"] == alone["choices"][0]["text"]
    (row,) = rows_of(folder / "d", [name])
    assert not open_books(row) and row["transfer_bytes"] > 0
    assert row["ledger_request_remote_prefill_ns"] > 1e9 * gap_seconds
    assert dict(row["loaded_tokens"])["peer"] >= 64


def test_what_a_server_has_no_part_in_is_refused_with_a_sentence(servers):
    prefill, decode, _ = servers
    params = prefilled(prefill, prompt=PROMPT)
    for server, body, words in (
        (decode, {"kv_transfer_params": REMOTE_DECODE, "max_tokens": 1}, "kv_role=prefill or both"),
        (prefill, {"kv_transfer_params": params}, "kv_role=decode or both"),
        (prefill, {"kv_transfer_params": REMOTE_DECODE, "max_tokens": 5}, "`max_tokens` 1"),
        (prefill, {"kv_transfer_params": REMOTE_DECODE, "max_tokens": 1, "n": 2}, "one choice"),
        (decode, {"kv_transfer_params": params, "prompt": "another"}, "of another prompt"),
        (decode, {"kv_transfer_params": params | {"remote_port": None}, "prompt": PROMPT}, "remote_port` is required"),
        (decode, {"kv_transfer_params": params | {"bootstrap": 1}, "prompt": PROMPT}, "bootstrap"),
        (decode, {"kv_transfer_params": params | {"remote_bootstrap_addr": prefill.url}}, "transfer_id` is required"),
        (
            decode,
            {"kv_transfer_params": params | {"remote_bootstrap_addr": "ftp://x", "transfer_id": "x"}, "prompt": PROMPT},
            "http://HOST:PORT",
        ),
    ):
        answer = post(server, **body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    other = prefilled(prefill, prompt=f"Other: {PROMPT}") | {"remote_host": "192.0.2.1"}
    foreign = post(decode, prompt=f"Other: {PROMPT}", kv_transfer_params=other)
    assert foreign.status_code == 502 and "kv_peers" in foreign.json()["error"]["message"]
    stale = {"do_remote_prefill": True, "transfer_id": "x", "remote_bootstrap_addr": prefill.url}
    foreign = post(decode, prompt=f"Stale: {PROMPT}", kv_transfer_params=stale | {"remote_engine_id": "of long ago"})
    assert foreign.status_code == 502 and "has to ask again" in foreign.json()["error"]["message"]
    assert httpx.get(f"{decode.url}/query").status_code == 404


def test_a_dead_prefill_server_costs_its_requests_a_local_prefill(servers):
    """The last test: it ends the prefill server."""
    prefill, decode, _ = servers
    prompt = PROMPT[1:]
    params = prefilled(prefill, prompt=prompt)
    alone = call(prefill, prompt=prompt)
    core = prefill.core_pid()
    os.kill(prefill.process.pid, signal.SIGKILL)
    os.kill(core, signal.SIGKILL)
    prefill.process.wait()
    wait_for(lambda: not psutil.pid_exists(core) or psutil.Process(core).status() == psutil.STATUS_ZOMBIE, 10)
    split = call(decode, prompt=prompt, kv_transfer_params=params | {"remote_engine_id": "of another life"})
    assert split["choices"] == alone["choices"]
    assert "could not be read" in decode.log.read_text()
