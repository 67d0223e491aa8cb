"""Users of a locustfile: Locust's totals, the run and the server agree on every request, however the load ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sojourn.loadgen.run.run_files import recover
from sojourn.loadgen.target.processes import free_port
from sojourn.metrics.run.directory import RunDirectory, with_latencies
from tests.loadgen.run.test_experiment import wait_for
from tests.loadgen.scripted_server import Script, ScriptedServer
from tests.loadgen.test_locust_page import Page, requests_of

FILE = """
import json, os, time
from locust import User, constant, task
from sojourn.loadgen import LLMUser


class Chat(LLMUser):
    slo = "ttft:5000 tpot:500"
    wait_time = constant(float(os.environ.get("WAIT_S", "0.05")))

    @task
    def ask(self):
        answer = self.chat("three words please", max_tokens=30, temperature=0)
        if folder := os.environ.get("ANSWERS"):
            with open(f"{folder}/answers-{os.getpid()}", "a") as file:
                file.write(json.dumps([answer.request_id, answer.ttft_ms, answer.tpot_ms, answer.e2e_ms]) + "\\n")

    @task
    def complete_one(self):
        self.complete("once upon a time", max_tokens=30, name="story")
"""
BUSY = """

class Busy(User):
    wait_time = constant(0.02)

    @task
    def burn(self):
        until = time.perf_counter() + 0.2
        while time.perf_counter() < until:
            pass
"""


def locust(folder: Path, server: ScriptedServer, *words: str, busy: bool = False, **environment: str):
    (folder / "own.py").write_text(FILE + (BUSY if busy else ""))
    command = [sys.executable, "-m", "locust", "-f", "own.py", "--host", server.url, "--headless", "--only-summary"]
    command += ["--run-dir", "run", "--csv", "own", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env=os.environ | environment)  # fmt: skip


def sent_ids(server: ScriptedServer) -> list[str]:
    return sorted(seen["headers"]["x-request-id"] for seen in server.seen)


def most_at_once(client: pd.DataFrame) -> int:
    ends = pd.concat([pd.Series(1, index=client.sent_ns), pd.Series(-1, index=client.last_byte_ns)])
    return int(ends.sort_index(kind="stable").cumsum().max())


@pytest.mark.server
@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_locust_the_run_and_the_server_agree_on_every_request(tmp_path, processes):
    server = ScriptedServer(Script(num_tokens=20, gap_s=0.004)).start()
    words = ["--users", "6", "--spawn-rate", "6", "--run-time", "8s" if processes else "4s"]
    if processes:
        port = str(free_port())
        words += ["--processes", str(processes), "--master-port", port, "--master-bind-port", port]
    load = locust(tmp_path, server, *words, ANSWERS=str(tmp_path))
    said = load.communicate(timeout=110)[0]
    run = RunDirectory.open(tmp_path / "run")
    client = with_latencies(run.table("client"))
    assert load.returncode == (0 if run.meta()["valid"] else 4), said
    assert sorted(client.request_id) == sent_ids(server) and len(client) > 10
    counted = requests_of(tmp_path / "own_stats.csv")
    chats = sum("messages" in seen["body"] for seen in server.seen)
    assert counted == {"Chat": chats, "story": len(client) - chats, "Aggregated": len(client)}
    assert set(client.status) == {"ok"} and set(client.klass) == {"Chat"}
    assert most_at_once(client) == 6 == run.meta()["scenario"]["arrivals"]["users"]
    assert all(seen["body"]["max_tokens"] == 30 and seen["body"]["model"] == "scripted" for seen in server.seen)
    files = [line for file in tmp_path.glob("answers-*") for line in file.read_text().splitlines()]
    answers = pd.DataFrame(map(json.loads, files), columns=["request_id", "ttft", "tpot", "e2e"])
    both = client.merge(answers, on="request_id")
    assert chats - 6 <= len(both) <= chats  # a user that STOP took for waiting does not see its last answer
    for mine, table in (("ttft", "ttft_ms"), ("tpot", "tpot_ms"), ("e2e", "e2e_ms")):
        assert np.allclose(both[mine], both[table])
    meta = run.meta()
    assert meta["arrivals"]["loop"] == "closed" and meta["objectives"][0]["source"] == "Chat.slo"
    assert meta["command"][:4] == ["sojourn", "locust", "-f", "own.py"]
    assert (run.path / "diagnosis.json").exists() and len(run.table("scrapes"))
    if processes:
        assert [part["state"] for part in meta["load_processes"]] == ["done"] * processes
        assert sum(part["requests"] for part in meta["load_processes"]) == len(client)


@pytest.mark.server
@pytest.mark.slow
def test_exit_code_and_totals_when_the_server_fails(tmp_path):
    server = ScriptedServer(Script(status=503)).start()
    load = locust(tmp_path, server, "--users", "3", "--spawn-rate", "3", "--run-time", "3s", WAIT_S="0.3")
    said = load.communicate(timeout=110)[0]
    run = RunDirectory.open(tmp_path / "run")
    assert load.returncode == (5 if run.meta()["valid"] else 4), said
    assert "measured requests failed" in said or "not valid" in said
    assert requests_of(tmp_path / "own_stats.csv")["Aggregated"] == len(server.seen) == len(run.table("client"))


@pytest.mark.server
@pytest.mark.slow
def test_stop_lets_tasks_end_and_a_second_run_begins(tmp_path):
    server = ScriptedServer(Script(num_tokens=4, gap_s=0.5)).start()
    (tmp_path / "own.py").write_text(FILE)
    page = Page(["-f", "own.py", "--host", server.url], tmp_path)
    try:
        wait_for(page.answers, 60)
        assert '"replays": false' in page.get("/")
        for run in ("one", "two"):
            before = len(server.seen)
            page.post("/swarm", user_count=3, spawn_rate=3, run_dir=run)
            wait_for(lambda before=before: len(server.seen) >= before + 3, 60)
            page.post("/stop")
            wait_for(lambda: "diagnose " in json.loads(page.get("/sojourn/state"))["message"], 90)
            client = RunDirectory.open(tmp_path / run).table("client")
            assert set(client.status) == {"ok"} and len(client) == len(server.seen) - before
            wait_for(lambda n=len(client): page.stats()["stats"][-1]["num_requests"] == n, 10)
    finally:
        page.process.kill()


@pytest.mark.server
@pytest.mark.slow
def test_killed_load_leaves_what_it_recorded_and_a_busy_one_says_that_it_was_late(tmp_path):
    server = ScriptedServer(Script(num_tokens=3)).start()
    load = locust(tmp_path, server, "--users", "4", "--spawn-rate", "4", busy=True)
    wait_for(lambda: len(server.seen) >= 25, 90)
    os.kill(load.pid, signal.SIGKILL)
    load.wait(30)
    assert recover(tmp_path / "run")
    run = RunDirectory.open(tmp_path / "run")
    recorded = set(run.table("client").request_id)
    assert len(recorded) > 5 and recorded <= set(sent_ids(server)) and not run.meta()["valid"]
    assert run.meta()["client_error"]["dispatch_p50_ms"] > 20  # users wait for the one that burns


FAULTS = """
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock
from sojourn.loadgen.tasks import session
from sojourn.loadgen.tasks.load import Part

environment = SimpleNamespace(process_exit_code=None)
recorder = session.Recorder.__new__(session.Recorder)
recorder.__dict__.update(environment=environment, run=MagicMock(path="runs/full"), page=MagicMock(),
                         _open=session.ExitStack(), _peak_users=1, _scraper=MagicMock())
if sys.argv[1] == "finish":
    session.finish_run = MagicMock(side_effect=OSError(28, "No space left on device"))
else:
    session.finish_run, session.ended_with, session.report = MagicMock(), lambda run: (0, ""), lambda run: ""
    recorder._open.callback(MagicMock(side_effect=OSError(28, "No space left on device")))
recorder.end([], "")
assert environment.process_exit_code == 1, environment
assert "No space left" in recorder.page.end.call_args.args[0] and recorder.page.end.call_args.args[1]

sent = []
tasks = session.Tasks.__new__(session.Tasks)
tasks.__dict__.update(_part=Part("r", "n", "p", 0, 1, 0), _shards={}, model="m", _recorder=recorder,
                      _runner=SimpleNamespace(send_message=lambda *words: sent.append(words)))
recorder.host = "http://h"
tasks._send_part("w1"), tasks._send_part("w2")
assert [words[2] for words in sent] == ["w1", "w2"]
tasks._load, tasks._is_ready = None, session.gevent.event.Event()
tasks._on_part(sent[1][1])
assert tasks.load(0.0) is None and tasks._is_ready.is_set()
"""


@pytest.mark.parametrize("where", ["finish", "close"])
def test_a_full_disk_and_a_worker_too_many_end_in_a_sentence(where):
    """In a process of its own: Locust replaces what blocks in the standard library."""
    done = subprocess.run([sys.executable, "-c", FAULTS, where], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    assert done.stderr.count("worker w2 sends nothing: the run has room for 1 workers") == 2, done.stderr
