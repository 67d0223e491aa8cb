"""A fleet's processes: all are ended, whatever fails. Servers and router are scripted; tests/peers has real ones."""

import os
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest

import sojourn.loadgen.fleet.fleet as module
from sojourn.engine.config import EngineConfig
from sojourn.loadgen.fleet.fleet import GIVEN, check_fleet, fleet, num_ranks
from sojourn.loadgen.fleet.routers import ROUTERS, VllmRouter, installed
from sojourn.loadgen.run.experiment import run_scenario
from sojourn.loadgen.scenario.fleet import FleetBlock
from sojourn.loadgen.target.processes import free_port
from sojourn.metrics.errors import ExperimentError, InputError
from tests.loadgen.scenarios import CHAT, scenario

ANSWERS = """
import http.server, sys
class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "scripted", "object": "model", "engine": {"block_size": 16}}]}')
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers).serve_forever()
"""
DIES = "import sys; sys.exit('the router has no licence')"


class ScriptedRouter:
    name, policies, install, keeps_request_ids = "scripted", ("any",), "pip install scripted", True

    def __init__(self, code: str):
        self.code = code

    def program(self, environment: Path | None) -> Path | None:
        return Path(sys.executable)

    def refusal(self, program: Path) -> str | None:
        return None

    def command(self, program, servers, port, policy) -> list[str]:
        self.servers = servers
        return [str(program), "-c", self.code, str(port)]


@pytest.fixture(autouse=True)
def scripted_servers(monkeypatch):
    def command(settings, port, run_dir):
        assert settings["kv_events"] != settings["kv_events_replay"]
        return [sys.executable, "-c", ANSWERS, str(port)]

    monkeypatch.setattr(module, "serve_command", command)


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if "BaseHTTP" in str(child.cmdline())]


def test_a_fleet_ends_with_its_block(tmp_path):
    router = ScriptedRouter(ANSWERS)
    with fleet({"model": "m"}, 2, router, router.program(None), tmp_path) as made:
        assert len(children()) == 3 and made.fault() is None
        assert len({server.kv_events for server in router.servers} | {server.url for server in router.servers}) == 4
        made.members[0].process.kill()
        made.members[0].process.wait()
        assert made.dead() == made.members[:1] and made.fault() is None, "the other server goes on"
        made.members[1].process.kill()
        made.members[1].process.wait()
        assert "all 2 servers ended" in made.fault()
    assert not children()


def test_a_router_that_ends_is_quoted_and_leaves_no_server(tmp_path):
    router = ScriptedRouter(DIES)
    with (
        pytest.raises(ExperimentError, match="the router has no licence"),
        fleet({"model": "m"}, 2, router, router.program(None), tmp_path),
    ):
        pass
    assert not children()


def test_a_router_that_is_not_installed_is_named_with_its_command(tmp_path):
    with pytest.raises(InputError, match="pip install vllm-router"):
        installed(ROUTERS["vllm-router"], tmp_path)


def test_events_of_each_server_reach_a_router_that_reads_them():
    servers = [module.FleetServer(f"http://s{i}", "m", "m", 16, f"tcp://e{i}", f"tcp://r{i}") for i in range(2)]
    command = VllmRouter().command(Path("vllm-router"), servers, 9000, "kv_aware")
    assert "http://s1=tcp://e1" in command and "http://s0=tcp://r0" in command
    assert "--kv-event-source" not in VllmRouter().command(Path("vllm-router"), servers, 9000, "round_robin")


def test_dynamo_is_named_with_its_command_where_it_is_not_installed(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with pytest.raises(InputError, match=r"pip install --no-deps ai-dynamo==1\.6\.1"):
        installed(ROUTERS["dynamo"], tmp_path)


def test_dynamo_gets_the_folder_of_the_checkpoint_and_each_server(tmp_path):
    servers = [
        module.FleetServer(f"http://s{i}", "m", "tiny-model", 16, f"tcp://e{i}", f"tcp://r{i}") for i in range(2)
    ]
    _, launcher, *words = ROUTERS["dynamo"].command(tmp_path / "python", servers, 8000, "kv")
    given = list(zip(words[::2], words[1::2], strict=True))
    assert Path(launcher).is_file() and [value for word, value in given if word == "--server"] == [
        "http://s0",
        "http://s1",
    ]
    assert (Path(dict(given)["--model"]) / "tokenizer.json").is_file()


def test_a_run_refuses_a_router_that_renames_requests(tmp_path):
    chosen = scenario({"process": "poisson", "rate_rps": 8, "count": 2}, [CHAT], engine={"model": "tiny-model"})
    with pytest.raises(InputError, match="ids of its own"):
        run_scenario(chosen.model_copy(update={"fleet": FleetBlock(replicas=2, router="dynamo")}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


RAY = """
import http.server, json, socket, subprocess, sys, time
answers, port, folder, count = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
def say(**fields):
    with open(f"{folder}/servers.jsonl", "a") as file:
        file.write(json.dumps(fields) + chr(10))
ports = sys.argv[5:]
servers = [subprocess.Popen([sys.executable, "-c", answers, each], start_new_session=True) for each in ports]
for number in reversed(range(count)):
    while socket.socket().connect_ex(("127.0.0.1", int(ports[number]))):
        time.sleep(0.05)
    say(number=number, state="ready", port=int(ports[number]), pid=servers[number].pid, exit_code=None)
say(state="running")
class Router(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"data": [{"id": "scripted"}]}')
    def do_POST(self):
        servers[0].kill()
        say(number=0, state="ended", port=int(ports[0]), pid=servers[0].pid, exit_code=servers[0].wait())
        say(number=2, state="ready", port=int(ports[2]), pid=servers[2].pid, exit_code=None)
        self.do_GET()
http.server.HTTPServer(("127.0.0.1", int(port)), Router).serve_forever()
"""


class ScriptedRay(ScriptedRouter):
    """Starts three servers, of which two count at first; a POST kills one, and the third takes its place."""

    def __init__(self):
        super().__init__("")

    def start_command(self, program, plan, port, policy) -> list[str]:
        self.plan = plan
        ports = [str(free_port()) for _ in range(3)]
        return [str(program), "-c", RAY, ANSWERS, str(port), str(plan.folder), str(plan.count), *ports]


def test_servers_that_a_router_starts_are_followed_and_none_is_left(tmp_path):
    router = ScriptedRay()
    with fleet({"model": "m", "tensor_parallel": 2}, 2, router, router.program(None), tmp_path, most=3) as made:
        assert [member.number for member in made.members] == [0, 1] and made.dead() == []
        assert made.members[1].served["id"] == "scripted" and made.members[1].log == tmp_path / "server-1.log"
        assert (router.plan.count, router.plan.most, router.plan.num_ranks) == (2, 3, 2)
        assert "--port" not in router.plan.command and "--run-dir" not in router.plan.command
        httpx.post(made.endpoint.url)
        assert [member.number for member in made.dead()] == [0] and made.members[0].process.returncode == -9
        assert [member.number for member in made.members] == [0, 1, 2] and made.fault() is None
        os.kill(made.router.pid, signal.SIGKILL)
        made.router.wait()
        assert "the router ended with exit code -9" in made.fault()
    assert not children(), "servers of a router that was killed"


def test_a_router_that_starts_servers_takes_no_settings_of_single_ones(tmp_path):
    chosen = scenario({"process": "poisson", "rate_rps": 8, "count": 2}, [CHAT], engine={"model": "tiny-model"})
    block = FleetBlock(replicas=2, router="ray", servers={1: {"max_num_seqs": 8}})
    with pytest.raises(InputError, match="server 1 has settings of its own"):
        run_scenario(chosen.model_copy(update={"fleet": block}), tmp_path / "run")
    with pytest.raises(InputError, match="vllm-router starts no servers"):
        check_fleet(ROUTERS["vllm-router"], {}, {}, most=4)


@pytest.mark.parametrize("name", GIVEN)
def test_what_a_fleet_chooses_for_each_server_is_refused(name, tmp_path):
    chosen = scenario({"process": "poisson", "rate_rps": 8, "count": 2}, [CHAT], engine={"model": "tiny-model"})
    fleet = FleetBlock(replicas=2, servers={1: {name: "x"}})
    with pytest.raises(InputError, match=f"a fleet chooses {name} itself"):
        run_scenario(chosen.model_copy(update={"fleet": fleet}), tmp_path / "run")
    with pytest.raises(InputError, match=f"a fleet chooses {name} itself"):
        check_fleet(ROUTERS["ray"], {name: "x"}, {})


def test_a_router_that_follows_kv_events_needs_servers_that_have_some():
    router, without = ROUTERS["vllm-router"], {"prefix_caching": False}
    for settings, own in ((without, {}), ({}, {1: without})):
        with pytest.raises(InputError, match=r"kv_aware needs KV events.* take another --policy: cache_aware"):
            check_fleet(router, settings, own)
        check_fleet(router, settings, own, policy="round_robin")
    check_fleet(router, {"prefix_caching": None}, {})


def test_ray_of_another_version_is_refused_by_name(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    with pytest.raises(InputError, match=r"not installed in .*pip install 'ray\[serve\]==2\.60\.0'"):
        installed(ROUTERS["ray"], tmp_path)
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    (packages / "ray-2.6.1.dist-info").mkdir(parents=True)
    with pytest.raises(InputError, match=r"it has ray 2\.6\.1, and scale/ray_app\.py is written for 2\.60"):
        installed(ROUTERS["ray"], tmp_path)
    (packages / "ray-2.6.1.dist-info").rename(packages / "ray-2.60.3.dist-info")
    assert installed(ROUTERS["ray"], tmp_path) == tmp_path / "bin" / "python"


@pytest.mark.parametrize(("settings", "ranks"), [
    ({}, 1), ({"tensor_parallel": 2, "pipeline_parallel": 3}, 6), ({"tensor_parallel": 2, "expert_parallel": 4}, 4),
    ({"tensor_parallel": 2, "device": "cpu"}, 0),
])  # fmt: skip
def test_a_server_takes_as_many_devices_as_it_has_ranks(settings, ranks):
    assert num_ranks(settings) == ranks
    if ranks:
        assert ranks == EngineConfig(model="tiny-model", **settings).num_ranks
