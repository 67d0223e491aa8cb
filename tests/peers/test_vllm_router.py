"""vLLM's router in front of two real servers: prefixes, round robin beside it, and a server that is killed.

SOJOURN_VLLM_ROUTER_PYTHON names the python of an environment with vllm-router.
"""

import asyncio
import os
import random
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
from sojourn.loadgen.run.experiment import run_scenario
from sojourn.loadgen.scenario.fleet import FleetBlock
from sojourn.loadgen.target.processes import free_port
from sojourn.metrics.run.directory import engine_settings
from sojourn.metrics.run.fleet import servers_of
from tests.loadgen.scenarios import CHAT, scenario

PYTHON = os.environ.get("SOJOURN_VLLM_ROUTER_PYTHON")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(PYTHON is None, reason="SOJOURN_VLLM_ROUTER_PYTHON names no python with vllm-router"),
    pytest.mark.timeout(300),
]
HEADS = [f"Story {i}: the function number {i} returns a list of all tensors that the model has. " * 5 for i in range(8)]
TURNS = 5


def served(folder: Path, policy: str):
    router = ROUTERS["vllm-router"]
    settings = {"model": "tiny-model", "threads": 1}
    return fleet(settings, 2, router, installed(router, Path(PYTHON).parent.parent), folder, policy=policy)


async def ask(client: httpx.AsyncClient, prompt: str, max_tokens: int, request_id: str) -> dict:
    body = {"model": "tiny-model", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    answer = await client.post("/v1/completions", json=body, headers={"x-request-id": request_id})
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]


async def conversations(made: Fleet, at_once: int = 2, pause_s: float = 0) -> tuple[int, int]:
    """Cached prompt tokens of all turns, and those that one cache without eviction would have hit."""
    dice, hits, pooled, seen = random.Random(0), 0, 0, []
    async with httpx.AsyncClient(base_url=made.endpoint.url, timeout=60) as client:
        for turn in range(TURNS):
            prompts = [f"{HEADS[head]}Question {turn}" for head in dice.sample(range(len(HEADS)), len(HEADS))]
            # The first turns come together, so that load spreads them; the others by two or one.
            together = len(HEADS) if turn == 0 else at_once
            for begin in range(0, len(prompts), together):
                some = prompts[begin : begin + together]
                calls = [ask(client, prompt, 2 if turn else 40, f"{turn}-{prompt[6]}") for prompt in some]
                usages = await asyncio.gather(*calls)
                await asyncio.sleep(pause_s)
                hits += sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
                url = f"{made.members[0].endpoint.url}/tokenize"
                tokens = [httpx.post(url, json={"prompt": prompt}).json()["tokens"] for prompt in some]
                pooled += sum(max((common(own, other) for other in seen), default=0) for own in tokens)
                seen += tokens
    return hits, pooled


def common(prompt: list[int], other: list[int]) -> int:
    """Tokens of the whole blocks with which both begin, without the prompt's last token."""
    pairs = zip(prompt[:-1], other, strict=False)
    same = next((index for index, (mine, its) in enumerate(pairs) if mine != its), min(len(prompt) - 1, len(other)))
    return same // 16 * 16


def requests_of(made: Fleet) -> list[set[str]]:
    answers = [httpx.get(f"{member.endpoint.url}/debug/requests?last=1000").json() for member in made.members]
    return [{record["request_id"] for record in answer["requests"]} for answer in answers]


def test_repeated_prefixes_go_to_the_server_that_holds_them(tmp_path):
    shares, processes = {}, []
    for policy in ("kv_aware", "round_robin"):
        with served(tmp_path / policy, policy) as made:
            hits, pooled = asyncio.run(conversations(made))
            shares[policy] = hits / pooled
            both = requests_of(made)
            assert all(both) and sum(map(len, both)) == TURNS * len(HEADS), "one server had no request, or a retry ran"
            processes += [made.router.pid, *(member.process.pid for member in made.members)]
    print(f"hits of the pooled infinite cache: {shares}")
    assert shares["kv_aware"] >= 0.9 > shares["round_robin"]
    assert not [pid for pid in processes if psutil.pid_exists(pid)], "the fleet left a process"


async def streamed(client: httpx.AsyncClient, index: int) -> bool:
    """Whether a stream came to its end."""
    body = {"model": "tiny-model", "prompt": f"{index} A list", "max_tokens": 1500, "stream": True, "ignore_eos": True}
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": f"s{index}"}) as answer:
            text = [chunk async for chunk in answer.aiter_text()]
    except httpx.TransportError:
        return False
    return "[DONE]" in "".join(text)


def test_a_killed_server_costs_only_its_open_streams(tmp_path):
    async def scenario(made: Fleet) -> tuple[list[bool], list[set[str]]]:
        async with httpx.AsyncClient(base_url=made.endpoint.url, timeout=120) as client:
            streams = [asyncio.create_task(streamed(client, index)) for index in range(6)]
            await asyncio.sleep(1)
            loads = [httpx.get(f"{member.endpoint.url}/get_load").json()[0]["num_reqs"] for member in made.members]
            assert min(loads) >= 2, f"the streams are not spread: {loads}"
            os.kill(made.members[1].process.pid, signal.SIGKILL)
            ended = [await stream for stream in streams]
            for index in range(20):
                await ask(client, f"{index} later", 2, f"later{index}")
            return ended, requests_of_living(made)

    with served(tmp_path, "round_robin") as made:
        ended, survivors = asyncio.run(scenario(made))
        assert [made.members[1]] == made.dead() and made.fault() is None
    lived = {index for index in range(6) if f"s{index}" in survivors[0]}
    assert lived and lived == {index for index, whole in enumerate(ended) if whole}


def requests_of_living(made: Fleet) -> list[set[str]]:
    return requests_of(Fleet(made.endpoint, made.folder, made.members[:1]))


def test_the_verb_starts_a_fleet_and_ctrl_c_ends_all_of_it(tmp_path):
    port = free_port()
    words = ["server", "fleet", "up", "2", "--router-env", str(Path(PYTHON).parent.parent), "--port", str(port)]
    command = [sys.executable, "-m", "sojourn", *words, "--run-dir", str(tmp_path / "fleet"), "--set", "threads=1"]
    with (tmp_path / "out").open("w+") as out, subprocess.Popen(command, stdout=out, stderr=out) as verb:
        deadline = time.monotonic() + 120
        while "is ready at" not in (tmp_path / "out").read_text():
            assert verb.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()
            time.sleep(0.2)
        children = psutil.Process(verb.pid).children(recursive=True)
        body = {"model": "tiny-model", "prompt": "A list is", "max_tokens": 4}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
        verb.send_signal(signal.SIGINT)
        code = verb.wait(40)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert code == 130, (tmp_path / "out").read_text()
    assert len(children) >= 3 and not [child for child in children if child.is_running()]
    assert all((tmp_path / "fleet" / f"server-{number}" / "run.json").is_file() for number in range(2))


def test_a_fleet_is_one_run(tmp_path):
    arrivals = {"process": "poisson", "rate_rps": 8, "count": 24}
    chosen = scenario(arrivals, [CHAT], engine={"model": "tiny-model", "threads": 1})
    block = FleetBlock(replicas=2, policy="round_robin", servers={1: {"max_num_seqs": 8}})
    environment = Path(PYTHON).parent.parent
    run = run_scenario(chosen.model_copy(update={"fleet": block}), tmp_path / "run", router_env=environment)
    requests, members = run.requests(), servers_of(run)
    assert [member.name for member in members] == ["server-0", "server-1"]
    assert set(requests.server) == {"server-0", "server-1"} and set(requests.status) == {"ok"}
    assert requests.unaccounted_ns.abs().max() <= 1, "closure: to the nanosecond"
    assert (requests.ledger_request_routing_ns > 0).all() and run.table("steps").empty
    for member, num_seqs in zip(members, (None, 8), strict=True):
        own = member.requests()
        assert set(own.request_id) == set(requests.request_id[requests.server == member.name])
        assert own.ledger_request_routing_ns.sum() == requests.ledger_request_routing_ns[
            requests.server == member.name].sum()  # fmt: skip
        seen = {name for names in member.table("steps").request_ids for name in names}
        assert set(own.request_id) <= seen and engine_settings(member.meta()).get("max_num_seqs") in (num_seqs, 64)
