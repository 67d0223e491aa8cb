"""A fleet's processes: all are ended, whatever fails. Servers and router are scripted; tests/peers has real ones."""

import sys
from pathlib import Path

import psutil
import pytest

import loadgen.fleet.fleet as module
from loadgen.fleet.fleet import fleet
from loadgen.fleet.routers import ROUTERS, VllmRouter, installed
from loadgen.run.experiment import run_scenario
from loadgen.scenario.fleet import FleetBlock
from metrics.errors import ExperimentError, InputError
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
    name, policies, install = "scripted", ("any",), "pip install scripted"

    def __init__(self, code: str):
        self.code = code

    def program(self, environment: Path | None) -> Path | None:
        return Path(sys.executable)

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
    return [child for child in psutil.Process().children(recursive=True) if str(child.cmdline()).count("BaseHTTP")]


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
