"""Ray Serve with `scale/ray_app.py` in front of real servers: answers, sessions, a killed replica, scaling, its ends.

SOJOURN_RAY_PYTHON names the python of an environment with ray[serve] 2.60.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from sojourn.loadgen.fleet.fleet import Fleet, Member, fleet
from sojourn.loadgen.fleet.routers import ROUTERS, installed
from sojourn.loadgen.run.experiment import run_scenario
from sojourn.loadgen.scenario.fleet import FleetBlock
from sojourn.loadgen.target.processes import free_port
from sojourn.metrics.errors import ExperimentError
from sojourn.metrics.run.fleet import servers_of
from tests.loadgen.scenarios import CHAT as CHAT_CLASS
from tests.loadgen.scenarios import scenario

PYTHON = os.environ.get("SOJOURN_RAY_PYTHON")
pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(PYTHON is None, reason="SOJOURN_RAY_PYTHON names no python with ray[serve]"),
    pytest.mark.timeout(300),
]
CHAT = {"messages": [{"role": "user", "content": "What is a tensor?"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
SETTINGS = {"model": "tiny-model", "threads": 1}


def served(folder: Path, policy: str = "consistent_hash", count: int = 2, most: int | None = None, **settings):
    router = ROUTERS["ray"]
    program = installed(router, Path(PYTHON).parent.parent)
    return fleet(SETTINGS | settings, count, router, program, folder, policy=policy, most=most)


@contextmanager
def leaving_nothing():
    """No process is left that was started within."""
    before = set(started_by(psutil.Process()))
    yield
    assert not set(started_by(psutil.Process())) - before, "the fleet left a process"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with leaving_nothing(), served(tmp_path_factory.mktemp("fleet")) as made:
        yield made


def started_by(process: psutil.Process) -> list[psutil.Process]:
    return [child for child in process.children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


def post(url: str, path: str, body: dict, **headers: str) -> httpx.Response:
    body = {"model": "tiny-model", "temperature": 0} | body
    return httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize(("path", "body"), [
    ("completions", {"prompt": "A list is", "max_tokens": 12}),
    ("completions", {"prompt": "A list is", "max_tokens": 40, "stop": [" the"]}),
    ("completions", {"prompt": "A list is", "max_tokens": 12, "temperature": 0.8, "seed": 7, "n": 2, "logprobs": 2}),
    ("completions", {"prompt": [5] * 5000, "max_tokens": 2}),
    ("chat/completions", CHAT | {"max_tokens": 12}),
    ("chat/completions", CHAT | {
        "max_tokens": 30, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    }),
    ("embeddings", {"input": "A"}),
    ("nothing", {}),
])  # fmt: skip
def test_answers_are_those_of_the_server(made, path, body):
    direct, through = (post(url, path, body) for url in (made.members[0].endpoint.url, made.endpoint.url))
    assert through.status_code == direct.status_code
    own = ("date", "server", "x-request-id", "content-length")
    assert {name: value for name, value in through.headers.items() if name not in own} == {
        name: value for name, value in direct.headers.items() if name not in own
    }
    of_a_call = ("id", "created", "ledger", "metrics", "usage")
    ours, theirs = ({key: value for key, value in answer.json().items() if key not in of_a_call}
                    for answer in (direct, through))  # fmt: skip
    assert theirs == ours


def test_a_web_page_of_another_host_is_refused_as_by_the_server(made):
    for url in (made.members[0].endpoint.url, made.endpoint.url):
        assert httpx.get(f"{url}/v1/models", headers={"host": "rebound.example"}).status_code == 400


def test_a_stream_comes_token_by_token(made):
    body = {"prompt": "A list is", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    whole = post(made.endpoint.url, "completions", body).json()["choices"][0]["text"]
    moments, text = [], ""
    body |= {"model": "tiny-model", "stream": True}
    with httpx.stream("POST", f"{made.endpoint.url}/v1/completions", json=body, timeout=60) as answer:
        for piece in answer.iter_text():
            moments.append(time.monotonic())
            text += piece
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    pieces = [choice["text"] for line in lines[:-1] for choice in json.loads(line)["choices"]]
    assert lines[-1] == "[DONE]" and "".join(pieces) == whole and len(pieces) > 150
    early = sum(moment < moments[0] + (moments[-1] - moments[0]) / 2 for moment in moments)
    assert len(moments) > 50 and early > len(moments) / 5, "the pieces came together"


def test_a_session_stays_on_its_server_and_records_have_the_clients_ids(made):
    for turn in range(4):
        for session in range(8):
            name = f"turn-{session}-{turn}"
            headers = {"x-request-id": name, "x-session-id": f"session {session}"}
            answer = post(made.endpoint.url, "completions", {"prompt": "A list", "max_tokens": 1}, **headers)
            assert answer.headers.get_list("x-request-id") == [name]
    homes = {}
    for member in made.members:
        for request in ended(member):
            if request["request_id"].startswith("turn-"):
                session = request["request_id"].split("-")[1]
                homes.setdefault(session, []).append(member.number)
                assert request["session"] == f"session {session}"
    assert {len(numbers) for numbers in homes.values()} == {4} and len(homes) == 8
    assert all(len(set(numbers)) == 1 for numbers in homes.values()), "a session moved"
    assert len({numbers[0] for numbers in homes.values()}) == 2, "one server had all sessions"


def ended(member: Member) -> list[dict]:
    return httpx.get(f"{member.endpoint.url}/debug/requests?last=1000").json()["requests"]


def test_a_client_that_goes_away_stops_the_server(made):
    def aborted() -> int:
        return sum(request["finish_reason"] == "abort" for member in made.members for request in ended(member))

    before = aborted()
    body = {"model": "tiny-model", "prompt": "Away", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{made.endpoint.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_text())
    wait_until(lambda: aborted() > before, 10, "the server goes on for a client that is gone")


def wait_until(holds, seconds: float, otherwise: str) -> float:
    """How long it took."""
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() < begin + seconds, otherwise
        time.sleep(0.1)
    return time.monotonic() - begin


async def streamed(client: httpx.AsyncClient, name: str, max_tokens: int = 1500) -> str:
    """The last event of a stream; what broke it, where it has no last one."""
    body = {"model": "tiny-model", "prompt": f"{name} A list", "max_tokens": max_tokens, "stream": True,
            "ignore_eos": True}  # fmt: skip
    text = ""
    try:
        async with client.stream("POST", "/v1/completions", json=body, headers={"x-request-id": name}) as answer:
            async for piece in answer.aiter_text():
                text += piece
    except httpx.TransportError as error:
        return type(error).__name__
    return text.strip().splitlines()[-1]


@pytest.mark.parametrize("victim", ["replica", "server"])
def test_a_killed_replica_costs_its_open_streams_and_is_replaced(tmp_path, victim):
    async def scenario(made: Fleet) -> tuple[list[str], list[int], float]:
        async with httpx.AsyncClient(base_url=made.endpoint.url, timeout=120) as client:
            streams = [asyncio.create_task(streamed(client, f"s{index}")) for index in range(6)]
            await asyncio.sleep(1)
            loads = [httpx.get(f"{member.endpoint.url}/get_load").json()[0]["num_reqs"] for member in made.members]
            assert min(loads) >= 2, f"the streams are not spread: {loads}"
            server = psutil.Process(made.members[1].process.pid)
            begin = time.monotonic()
            (server.parent() if victim == "replica" else server).kill()
            await asyncio.sleep(1)  # a server's replica takes half a second to end, and answers 503 until then
            body = {"model": "tiny-model", "prompt": "later", "max_tokens": 2}
            later = [(await client.post("/v1/completions", json=body)).status_code for _ in range(40)]
            ends = [await stream for stream in streams]
            while len(made.members) - len(made.dead()) < 2:
                assert time.monotonic() < begin + 60, "it is not replaced"
                await asyncio.sleep(0.1)
            return ends, later, time.monotonic() - begin

    with leaving_nothing(), served(tmp_path, "round_robin") as made:
        ends, later, seconds = asyncio.run(scenario(made))
        print(f"full strength {seconds:.1f} s after the {victim} was killed")
        assert [made.members[1]] == made.dead() and made.fault() is None
        assert later == [200] * 40
        lived = {request["request_id"] for request in ended(made.members[0])}
        whole = {f"s{index}" for index, end in enumerate(ends) if end == "data: [DONE]"}
        assert whole and whole == {name for name in lived if name.startswith("s")}
        broken = {end for end in ends if end != "data: [DONE]"}
        assert broken and all(("server_lost" in end) == (victim == "server") for end in broken)
        wait_until(lambda: answered_by(made, made.members[2]), 20, "the new server gets no calls")
    records = [tmp_path / f"server-{number}" / "run.json" for number in range(3)]
    assert all(path.is_file() for path in records)


def answered_by(made: Fleet, member: Member) -> bool:
    post(made.endpoint.url, "completions", {"prompt": "more", "max_tokens": 1})
    return bool(ended(member))


def test_calls_go_round_a_server_whose_core_died_until_it_is_back(tmp_path):
    with served(tmp_path, "round_robin") as made:
        member = made.members[0]
        (core,) = [child for child in psutil.Process(member.process.pid).children(recursive=True)
                   if child.name().startswith("sojourn-core")]  # fmt: skip
        core.kill()
        ready = f"{member.endpoint.url}/ready"
        wait_until(lambda: httpx.get(ready).status_code == 503, 5, "its core is alive")
        time.sleep(1.5)  # Ray asks each replica once a second
        statuses = []
        while httpx.get(ready).status_code == 503:
            statuses.append(post(made.endpoint.url, "completions", {"prompt": "A", "max_tokens": 1}).status_code)
        assert set(statuses) == {200} and len(statuses) > 2
        before = len(ended(member))
        wait_until(lambda: answered_by(made, member) and len(ended(member)) > before, 20, "it gets no calls any more")
        assert made.dead() == []


def test_a_full_queue_is_told_to_the_client(tmp_path):
    async def scenario(made: Fleet) -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=made.endpoint.url, timeout=120) as client:
            body = {"model": "tiny-model", "prompt": "many", "max_tokens": 300, "ignore_eos": True}
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(24)))

    with served(tmp_path, "least_requests", max_num_seqs=2, max_waiting=2) as made:
        answers = asyncio.run(scenario(made))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert {answer.status_code for answer in answers} == {200, 429}
    assert all(answer.headers["retry-after"] and answer.json()["error"]["code"] for answer in refused)


def test_servers_are_added_while_requests_wait_and_drain_when_they_do_not(tmp_path):
    async def scenario(made: Fleet) -> tuple[float, float, str]:
        async with httpx.AsyncClient(base_url=made.endpoint.url, timeout=120) as client:
            begin, number, under_way = time.monotonic(), 0, set()
            while not any(request["request_id"].startswith("w") for request in ended_of_second(made)):
                assert time.monotonic() < begin + 90, "no server was added, or it gets no calls"
                while len(under_way) < 16:
                    number += 1
                    under_way.add(asyncio.create_task(streamed(client, f"w{number}", 200)))
                _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            up = time.monotonic() - begin
            assert {await each for each in under_way} == {"data: [DONE]"}, "a server that was added cost a stream"
            begin, lasting = time.monotonic(), None
            while not made.dead():
                assert time.monotonic() < begin + 120, "no server was taken away"
                if lasting is None or lasting.done():  # some stream is open whenever a server is to go
                    assert lasting is None or lasting.result() == "data: [DONE]"
                    lasting = asyncio.create_task(streamed(client, "lasting", 300))
                await asyncio.sleep(0.2)
            return up, time.monotonic() - begin, await lasting

    with served(tmp_path, "least_requests", count=1, most=2, max_num_seqs=2) as made:
        up, down, last = asyncio.run(scenario(made))
        print(f"a second server had calls after {up:.1f} s of load, and one was gone {down:.1f} s after it")
        assert last == "data: [DONE]" and len(made.members) == 2
        assert [member.process.returncode for member in made.dead()] == [0], "it did not end in order"


def test_a_server_is_added_while_requests_miss_an_objective(tmp_path):
    with served(tmp_path, "least_requests", count=1, most=2, objective_ttft_ms=0.1) as made:
        begin = time.monotonic()
        while len(made.members) < 2:
            assert time.monotonic() < begin + 90, "no server was added"
            post(made.endpoint.url, "completions", {"prompt": "late", "max_tokens": 2})
            made.look()


def ended_of_second(made: Fleet) -> list[dict]:
    made.look()
    return ended(made.members[1]) if len(made.members) > 1 else []


def test_a_fleet_is_one_run(tmp_path):
    arrivals = {"process": "poisson", "rate_rps": 8, "count": 24}
    chosen = scenario(arrivals, [CHAT_CLASS], engine=SETTINGS)
    block = FleetBlock(replicas=2, router="ray", policy="round_robin")
    environment = Path(PYTHON).parent.parent
    run = run_scenario(chosen.model_copy(update={"fleet": block}), tmp_path / "run", router_env=environment)
    requests, members = run.requests(), servers_of(run)
    assert [member.name for member in members] == ["server-0", "server-1"]
    assert set(requests.server) == {"server-0", "server-1"} and set(requests.status) == {"ok"}
    assert requests.unaccounted_ns.abs().max() <= 1, "closure: to the nanosecond"
    assert (requests.ledger_request_routing_ns > 0).all() and run.table("steps").empty
    assert all(len(member.table("steps")) for member in members)


def test_a_server_that_cannot_start_is_quoted_and_nothing_is_left(tmp_path):
    with (
        leaving_nothing(),
        pytest.raises(ExperimentError, match=r"did not start(?s:.*)no-such-model"),
        served(tmp_path, model="no-such-model"),
    ):
        pass


@contextmanager
def verb(folder: Path, port: int, *more: str):
    """`sojourn server fleet up`, its output, and all the processes that it started."""
    words = ["server", "fleet", "up", "2", "--router", "ray", "--router-env", str(Path(PYTHON).parent.parent)]
    command = [sys.executable, "-m", "sojourn", *words, "--port", str(port), "--run-dir", str(folder / "fleet"), *more]
    with (folder / "out").open("w+") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            wait_until(lambda: "is ready at" in said(folder) or process.poll() is not None, 120, "it is not ready")
            yield process, started_by(psutil.Process(process.pid)) if process.poll() is None else []
        finally:
            process.kill()


def said(folder: Path) -> str:
    return " ".join((folder / "out").read_text().split())


@pytest.mark.parametrize("how", ["interrupt", "kill the verb", "kill the launcher"])
def test_whatever_ends_a_fleet_ends_all_of_it(tmp_path, how):
    port = free_port()
    with verb(tmp_path, port) as (process, started):
        own = {child.pid for child in started}
        outside = [found.laddr for found in psutil.net_connections("inet")
                   if found.pid in own and found.status in ("LISTEN", "NONE") and found.laddr
                   and found.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1")]  # fmt: skip
        answer = post(f"http://127.0.0.1:{port}", "completions", {"prompt": "A list is", "max_tokens": 4})
        launcher = next(child for child in started if "ray_fleet.py" in " ".join(child.cmdline()))
        {"interrupt": lambda: process.send_signal(signal.SIGINT), "kill the verb": process.kill,
         "kill the launcher": launcher.kill}[how]()  # fmt: skip
        code = process.wait(60)
    assert answer.status_code == 200 and outside == [], "only the loopback"
    assert code == {"interrupt": 130, "kill the verb": -9, "kill the launcher": 1}[how], said(tmp_path)
    assert len(started) >= 10
    wait_until(lambda: not [child for child in started if is_alive(child)], 30, "an orphan")
    assert all((tmp_path / "fleet" / f"server-{number}" / "run.json").is_file() for number in range(2))
    assert how != "kill the launcher" or "the router ended" in said(tmp_path)


def test_ctrl_c_while_it_starts_leaves_nothing(tmp_path):
    words = ["server", "fleet", "up", "2", "--router", "ray", "--router-env", str(Path(PYTHON).parent.parent)]
    command = [
        sys.executable,
        "-m",
        "sojourn",
        *words,
        "--port",
        str(free_port()),
        "--run-dir",
        str(tmp_path / "fleet"),
    ]
    with (tmp_path / "out").open("w+") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        loading = tmp_path / "fleet" / "server-0.log"
        wait_until(lambda: loading.is_file() or process.poll() is not None, 90, "no server starts")
        started = started_by(psutil.Process(process.pid))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, said(tmp_path)
    assert len(started) >= 8
    wait_until(lambda: not [child for child in started if is_alive(child)], 30, "an orphan")


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def test_a_port_that_is_taken_is_a_sentence(tmp_path, made):
    port = made.endpoint.port
    with verb(tmp_path, port) as (process, _):
        assert process.wait(60) == 1
    assert f"port {port} of the loopback: Address already in use; choose another with --port" in said(tmp_path)


READS = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from sojourn.scale.ray_app import Options
document = yaml.safe_load(open(sys.argv[1]))
for application in ServeDeploySchema(**document).applications:
    print(application.import_path, Options(**application.args).words[:2])
"""


def test_the_configuration_for_a_cluster_fits_rays_schema_and_our_options():
    root = Path(__file__).parents[2]
    command = [PYTHON, "-c", READS, str(root / "scale" / "ray_serve.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.stdout == "sojourn.scale.ray_app:build ['sojourn', 'serve']\n", done.stderr
