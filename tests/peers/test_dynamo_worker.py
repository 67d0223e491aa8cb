"""Dynamo's frontend in front of two real servers, by `scale/dynamo_worker.py`: answers, prefixes, a killed server.

SOJOURN_DYNAMO_PYTHON names the python of an environment with ai-dynamo and ai-dynamo-runtime 1.6.1, and what
`sojourn server fleet up --router dynamo` says beside them.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from sojourn.loadgen.fleet.fleet import Fleet, fleet
from sojourn.loadgen.fleet.routers import ROUTERS, installed
from sojourn.loadgen.target.processes import free_port
from tests.peers.test_vllm_router import HEADS, TURNS, conversations

PYTHON = os.environ.get("SOJOURN_DYNAMO_PYTHON")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(PYTHON is None, reason="SOJOURN_DYNAMO_PYTHON names no python with ai-dynamo"),
    pytest.mark.timeout(300),
]
CHAT = {"messages": [{"role": "user", "content": "What is a tensor?"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


def served(folder: Path, policy: str = "kv", **settings):
    router, settings = ROUTERS["dynamo"], {"model": "tiny-model", "threads": 1} | settings
    return fleet(settings, 2, router, installed(router, Path(PYTHON).parent.parent), folder, policy=policy)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with served(tmp_path_factory.mktemp("fleet"), "round-robin") as made:
        yield made
    assert not children(), "the fleet left a process"


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "dynamo" in " ".join(child.cmdline())]


def post(url: str, path: str, body: dict) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json={"model": "tiny-model", "temperature": 0} | body, timeout=60)


@pytest.mark.parametrize(("path", "body"), [
    ("completions", {"prompt": "A list is", "max_tokens": 12}),
    ("completions", {"prompt": "A list is", "max_tokens": 40, "stop": [" the"]}),
    ("completions", {"prompt": "A list is", "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 7}),
    ("chat/completions", CHAT | {"max_tokens": 12}),
    ("chat/completions", CHAT | {
        "max_tokens": 30, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }),
])  # fmt: skip
def test_answers_are_those_of_the_server(made, path, body):
    ours, theirs = (post(url, path, body).json() for url in (made.members[0].endpoint.url, made.endpoint.url))
    assert texts(theirs) == texts(ours) and all(texts(ours))
    for count in ("prompt_tokens", "completion_tokens"):
        assert "stop" in body or theirs["usage"][count] == ours["usage"][count]


def texts(answer: dict) -> list[tuple[str, str]]:
    return [
        (choice.get("text") or choice["message"]["content"], choice["finish_reason"]) for choice in answer["choices"]
    ]


def test_a_stream_is_the_whole_answer(made):
    body = {"prompt": "A list is", "max_tokens": 12, "temperature": 0}
    whole = post(made.endpoint.url, "completions", body).json()["choices"][0]["text"]
    answer = post(made.endpoint.url, "completions", body | {"stream": True})
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    pieces = [choice["text"] for chunk in chunks for choice in chunk["choices"]]
    assert lines[-1] == "[DONE]" and len(pieces) > 6 and "".join(pieces) == whole


def test_what_cannot_be_passed_on_is_refused_by_name(made):
    asked = post(made.endpoint.url, "chat/completions", CHAT | {"logprobs": True, "top_logprobs": 3, "max_tokens": 2})
    assert asked.status_code == 400 and "log-probabilities" in asked.text
    two = post(made.endpoint.url, "completions", {"prompt": "A", "n": 2, "temperature": 1, "max_tokens": 2})
    assert two.status_code == 400 and "n=2" in two.text
    long = post(made.endpoint.url, "completions", {"prompt": [5] * 5000, "max_tokens": 2})
    assert long.status_code == 400


def test_a_client_that_goes_away_stops_the_server(made):
    def aborted() -> int:
        return sum(request["finish_reason"] == "abort" for request in ended(made))

    before = aborted()  # a stop string also ends a request on the server
    body = {"model": "tiny-model", "prompt": "Away", "max_tokens": 2000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{made.endpoint.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_text())
    deadline = time.monotonic() + 10
    while aborted() == before:
        assert time.monotonic() < deadline, "the server goes on for a client that is gone"
        time.sleep(0.1)


def ended(made: Fleet, *numbers: int) -> list[dict]:
    """The records of all servers, or of those."""
    members = [member for member in made.members if not numbers or member.number in numbers]
    answers = [httpx.get(f"{member.endpoint.url}/debug/requests?last=1000") for member in members]
    return [request for answer in answers for request in answer.json()["requests"]]


def open_requests(made: Fleet) -> list[int]:
    alive = [member for member in made.members if member.process.poll() is None]
    return [httpx.get(f"{member.endpoint.url}/get_load").json()[0]["num_reqs"] for member in alive]


def test_repeated_prefixes_go_to_the_server_that_holds_them(tmp_path):
    shares = {}
    for policy in ("kv", "round-robin"):
        with served(tmp_path / policy, policy) as made:
            # One at a time: Dynamo weighs a block of load as much as a block of prefix.
            hits, pooled = asyncio.run(conversations(made, at_once=1, pause_s=0.1))
            shares[policy] = hits / pooled
            assert len(ended(made)) == TURNS * len(HEADS), "a call was repeated"
    print(f"hits of the pooled infinite cache: {shares}")
    assert shares["kv"] >= 0.9 > shares["round-robin"]


async def streamed(client: httpx.AsyncClient, index: int) -> tuple[bool, int]:
    """Whether it came to its end, and its tokens."""
    body = {"model": "tiny-model", "prompt": f"{index} A list", "max_tokens": 1500, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True}}  # fmt: skip
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        text = "".join([chunk async for chunk in answer.aiter_text()])
    usage = [json.loads(line[6:]).get("usage") for line in text.splitlines() if line.startswith("data: {")]
    return "[DONE]" in text, max((each or {}).get("completion_tokens", 0) for each in usage)


def test_streams_of_a_killed_server_go_on_at_the_other(tmp_path):
    async def scenario(made: Fleet) -> list[tuple[bool, int]]:
        async with httpx.AsyncClient(base_url=made.endpoint.url, timeout=120) as client:
            streams = [asyncio.create_task(streamed(client, index)) for index in range(6)]
            await asyncio.sleep(1)
            assert min(open_requests(made)) >= 2, f"the streams are not spread: {open_requests(made)}"
            os.kill(made.members[1].process.pid, signal.SIGKILL)
            whole = [await stream for stream in streams]
            body = {"model": "tiny-model", "prompt": "later", "max_tokens": 2}
            later = [await client.post("/v1/completions", json=body) for _ in range(20)]
            assert [answer.status_code for answer in later] == [200] * 20
            return whole

    with served(tmp_path, "round-robin") as made:
        whole = asyncio.run(scenario(made))
        assert [made.members[1]] == made.dead() and made.fault() is None
    assert whole == [(True, 1500)] * 6


def cores(member) -> list[psutil.Process]:
    return [child for child in psutil.Process(member.process.pid).children(recursive=True)
            if child.name().startswith("sojourn-core")]  # fmt: skip


def test_calls_go_round_a_server_whose_core_died_until_it_is_back(tmp_path):
    def ask(made: Fleet, count: int) -> list[int]:
        return [post(made.endpoint.url, "completions", {"prompt": f"{number}", "max_tokens": 2}).status_code
                for number in range(count)]  # fmt: skip

    with served(tmp_path, "round-robin") as made:
        (core,) = cores(made.members[0])
        core.kill()
        assert ask(made, 20) == [200] * 20
        deadline = time.monotonic() + 30
        before = len(ended(made, 0))
        while len(ended(made, 0)) == before:
            assert time.monotonic() < deadline, "the server is not asked again"
            assert ask(made, 4) == [200] * 4


def test_a_server_that_drains_loses_no_call(tmp_path):
    async def scenario(made: Fleet) -> tuple[list[bool], list[int]]:
        async with httpx.AsyncClient(base_url=made.endpoint.url, timeout=120) as client:
            streams = [asyncio.create_task(streamed(client, index)) for index in range(4)]
            await asyncio.sleep(0.5)
            made.members[0].process.terminate()
            body = {"model": "tiny-model", "prompt": "later", "max_tokens": 2}
            later = [(await client.post("/v1/completions", json=body)).status_code for _ in range(20)]
            return [await stream for stream in streams], later

    with served(tmp_path, "round-robin") as made:
        whole, later = asyncio.run(scenario(made))
    assert whole == [(True, 1500)] * 4 and later == [200] * 20


def test_a_full_queue_is_told_to_the_client(tmp_path):
    async def scenario(made: Fleet) -> set[int]:
        async with httpx.AsyncClient(base_url=made.endpoint.url, timeout=120) as client:
            body = {"model": "tiny-model", "prompt": "many", "max_tokens": 300, "ignore_eos": True}
            answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(24)))
            return {answer.status_code for answer in answers}

    with served(tmp_path, "round-robin", max_num_seqs=2, max_waiting=2) as made:
        assert asyncio.run(scenario(made)) == {200, 429}


def test_the_verb_ends_all_of_it_at_ctrl_c(tmp_path):
    port = free_port()
    words = [
        "server",
        "fleet",
        "up",
        "2",
        "--router",
        "dynamo",
        "--router-env",
        str(Path(PYTHON).parent.parent),
        "--port",
    ]
    command = [sys.executable, "-m", "sojourn", *words, str(port), "--run-dir", str(tmp_path / "fleet")]
    with (tmp_path / "out").open("w+") as out, subprocess.Popen(command, stdout=out, stderr=out) as verb:
        deadline = time.monotonic() + 120
        while "is ready at" not in (tmp_path / "out").read_text():
            assert verb.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.2)
        started = psutil.Process(verb.pid).children(recursive=True)
        own = [child.pid for child in started]
        outside = [found.laddr for found in psutil.net_connections("tcp")
                   if found.pid in own and found.status == "LISTEN" and found.laddr.ip != "127.0.0.1"]  # fmt: skip
        answer = post(f"http://127.0.0.1:{port}", "completions", {"prompt": "A list is", "max_tokens": 4})
        verb.send_signal(signal.SIGINT)
        code = verb.wait(60)
    assert answer.status_code == 200 and outside == [], "only the loopback"
    assert code == 130, (tmp_path / "out").read_text()
    assert len(started) >= 6 and not [child for child in started if child.is_running()]
