"""How the real server ends, and how it outlives a core that hangs."""

import contextlib
import json
import os
import signal
import time

import httpx
import psutil
import pytest

from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server.planted import planted_server
from tests.engine.server_process import post, serving, wait_for

pytestmark = pytest.mark.server

LONG = {"model": "tiny-model", "prompt": "The", "max_tokens": 4000, "stream": True, "ignore_eos": True}


@contextlib.contextmanager
def open_stream(url: str):
    """The lines of a stream that has begun."""
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=30) as stream:
        lines = stream.iter_lines()
        next(lines)
        yield lines


def last_error(lines) -> str:
    *_, last = (line for line in lines if line)
    return json.loads(last.removeprefix("data: "))["error"]["code"]


def test_a_second_signal_ends_the_server_within_two_seconds_and_every_stream_with_an_error(tmp_path):
    """The core is stopped, so that it answers nothing."""
    with (
        serving(tmp_path, "tiny-model", "--run-dir", str(tmp_path / "run"), "--spare-core") as server,
        open_stream(server.url) as lines,
    ):
        children = psutil.Process(server.process.pid).children()
        os.kill(server.core_pid(), signal.SIGSTOP)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/ready").json()["status"] == "draining")
        begin = time.monotonic()
        for number in (signal.SIGINT, signal.SIGTERM):  # the third changes nothing
            server.process.send_signal(number)
            time.sleep(0.05)
        assert last_error(lines) == "engine_draining"
        assert server.process.wait(timeout=10) == 128 + signal.SIGINT
        assert time.monotonic() - begin < 2
        assert not psutil.wait_procs(children, timeout=1)[1] or not any(map(is_running, children))
    assert "Traceback" not in server.log.read_text()
    assert len(RunDirectory.open(tmp_path / "run").table("requests")) == 1


def is_running(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_loop_that_hangs_is_told_by_ready_and_replaced(tmp_path):
    options = ("--core-silence-seconds", "2", "--core-hung-seconds", "3")
    with planted_server(tmp_path, *options) as (server, plants):
        first = server.core_pid()
        with open_stream(server.url) as lines, plants.planted("schedule", 60):
            answer = wait_for(lambda: (ready := httpx.get(f"{server.url}/ready")).status_code == 503 and ready)
            assert answer.json()["status"] == "hung" and "no sign of life" in answer.json()["detail"]
            assert post(server).json()["error"]["code"] == "engine_hung"
            assert last_error(lines) == "engine_core_died"
        server.wait_ready()
        assert server.core_pid() != first and post(server).status_code == 200
