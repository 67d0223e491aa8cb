"""What a router asks of a server over HTTP, and over the sockets of KV events."""

import os
import signal
import time

import httpx
import msgspec
import pytest
import zmq

from tests.engine.kv_event_index import KVEventIndex
from tests.engine.server_process import ended_request, post, serving

pytestmark = pytest.mark.server
PROMPT = "The function returns a list of all the tensors that the model has, one for each layer of it. " * 3


def test_a_rendered_body_has_the_tokens_that_the_engine_computes(api_server):
    rendered = post(api_server, "/v1/completions/render", prompt=[PROMPT, "A list"], max_tokens=7).json()
    assert [each["sampling_params"]["max_tokens"] for each in rendered] == [7, 7]
    answer = post(api_server, prompt=PROMPT, max_tokens=1, return_token_ids=True).json()
    assert rendered[0]["token_ids"] == answer["choices"][0]["prompt_token_ids"]
    tokenized = httpx.post(f"{api_server.url}/tokenize", json={"prompt": "A list"}).json()
    assert rendered[1]["token_ids"] == tokenized["tokens"]
    chat = {"messages": [{"role": "user", "content": "What is a tensor?"}], "max_tokens": 3}
    url = f"{api_server.url}/v1/chat/completions"
    body = httpx.post(f"{url}/render", json=chat | {"model": "tiny-model", "cache_salt": "s"}).json()
    usage = httpx.post(url, json=chat | {"model": "tiny-model"}, timeout=30).json()["usage"]
    assert len(body["token_ids"]) == usage["prompt_tokens"] and body["cache_salt"] == "s"


def test_a_body_that_would_be_refused_is_not_rendered(api_server):
    for wrong in ({"prompt": ""}, {"prompt": "A", "temperature": -1}, {"prompt": "A", "max_tokens": 10**6}):
        render, run = (post(api_server, path, **wrong) for path in ("/v1/completions/render", "/v1/completions"))
        assert render.status_code == run.status_code == 400
        assert render.json()["error"]["message"] == run.json()["error"]["message"]


def test_load_and_facts_are_told_and_a_session_is_recorded(api_server):
    load = httpx.get(f"{api_server.url}/get_load").json()
    assert [set(rank) for rank in load] == [{"dp_rank", "num_reqs", "num_waiting_reqs", "num_tokens"}]
    facts = httpx.get(f"{api_server.url}/server_info").json()
    assert facts["served_model_name"] == "tiny-model" and facts["block_size"] == 16 and facts["kv_events"] is None
    body = {"model": "tiny-model", "prompt": "A", "max_tokens": 1}
    headers = {"x-session-id": "talk-7", "x-request-id": "asked-1"}
    assert httpx.post(f"{api_server.url}/v1/completions", json=body, headers=headers, timeout=30).status_code == 200
    assert ended_request(api_server, "asked-1")["session"] == "talk-7"


def test_events_follow_a_real_server_over_the_death_of_its_core(tmp_path):
    options = ("--kv-events", f"ipc://{tmp_path}/events", "--kv-events-replay", f"ipc://{tmp_path}/replay")
    with serving(tmp_path, "tiny-model", *options) as server, zmq.Context() as context:
        assert post(server, prompt=PROMPT, max_tokens=1).status_code == 200
        index = KVEventIndex()
        batches = longer_than(0, context, tmp_path)  # they come behind the answer
        for batch in batches:
            index.apply(batch)
        tokens = httpx.post(f"{server.url}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
        longest = max(index.prefixes.values(), key=len)
        assert [token for _, block in longest for token in block] == tokens[: len(tokens) // 16 * 16]
        os.kill(server.core_pid(), signal.SIGKILL)
        later = longer_than(len(batches), context, tmp_path)
        assert later[:-1] == batches and msgspec.msgpack.decode(later[-1])[1] == [{"type": "AllBlocksCleared"}]


def longer_than(count: int, context: zmq.Context, folder) -> list[bytes]:
    """All batches, once there are more than so many."""
    deadline = time.monotonic() + 20
    while len(batches := replayed(context, folder)) <= count:
        assert time.monotonic() < deadline, "no event came"
        time.sleep(0.05)
    return batches


def replayed(context: zmq.Context, folder) -> list[bytes]:
    """All batches so far; their numbers have no gap."""
    with context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"ipc://{folder}/replay")
        dealer.send_multipart([b"", bytes(8)])
        batches = []
        while (frames := dealer.recv_multipart())[-2] != b"\xff" * 8:
            assert int.from_bytes(frames[-2], "big") == len(batches)
            batches.append(frames[-1])
        return batches
