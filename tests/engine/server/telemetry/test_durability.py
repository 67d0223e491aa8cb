"""A server that is killed loses at most the last second of its records, of steps too."""

import contextlib
import os
import signal
import threading
import time

import httpx
import pytest

from sojourn.metrics.run.directory import RunDirectory
from tests.engine.server_process import serving

pytestmark = pytest.mark.server

SECOND_NS = 1_000_000_000


def keep_busy(url: str) -> None:
    """Streams until the server is gone."""
    body = {"model": "tiny-model", "prompt": "The function", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as reply,
    ):
        for _ in reply.iter_raw():
            pass


@pytest.mark.parametrize("victim", ["front", "core"])
def test_a_server_that_is_killed_loses_at_most_the_last_second_of_steps(tmp_path, victim):
    with serving(tmp_path, "tiny-model", "--run-dir", str(tmp_path / "run")) as server:
        core = server.core_pid()
        clients = [threading.Thread(target=keep_busy, args=(server.url,)) for _ in range(4)]
        for client in clients:
            client.start()
        while server.gauge("sojourn_request_running") < 4:
            time.sleep(0.05)
        time.sleep(2)
        killed_ns = time.monotonic_ns()
        os.kill(server.process.pid if victim == "front" else core, signal.SIGKILL)
        if victim == "core":
            time.sleep(1.5)  # the front goes on, and writes what it was sent
        else:
            server.process.wait()
        steps = RunDirectory(tmp_path / "run").table("steps")
    for client in clients:
        client.join()
    before = steps[steps.begin_ns < killed_ns]
    # A busy machine may keep the writer waiting: the promise is one second, the bound two.
    bound_ns = 2 * SECOND_NS if victim == "front" else SECOND_NS // 4
    assert killed_ns - before.end_ns.max() < bound_ns
    assert before.step.tolist() == list(range(len(before))), "no step is missing before the last one"
