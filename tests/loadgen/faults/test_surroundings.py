import http.server
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest
from pydantic import TypeAdapter, ValidationError

from sojourn.loadgen.faults.kernel_burst import KernelBurst
from sojourn.loadgen.faults.planted import SurroundingFault
from sojourn.loadgen.faults.surroundings import PlantedSurroundings
from sojourn.loadgen.target.endpoint import Endpoint

READ = TypeAdapter(list[SurroundingFault])


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ({"fault": "network"}, "changes nothing; give delay_ms, jitter_ms or kib_per_s"),
        (
            {"fault": "noisy_neighbour", "from_s": 3, "until_s": 2},
            "has until_s 2, which is not after from_s 3; raise it",
        ),
        (
            {"fault": "starved_load_generator", "pause_ms": 9, "every_ms": 9},
            "pauses for 9 of every 9 ms; raise every_ms",
        ),
        ({"fault": "noisy_neighbour", "processes": 0}, "greater than or equal to 1"),
    ],
)
def test_a_bad_fault_gets_a_sentence(fault, sentence):
    with pytest.raises(ValidationError, match=sentence):
        READ.validate_python([fault])


@pytest.fixture
def echo():
    """A server that answers each line with itself, and with 64 KiB where it is `much`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer(connection: socket.socket) -> None:
        with connection:
            while line := connection.recv(100):
                connection.sendall(b"x" * 65_536 if line == b"much" else line)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=[connection], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield Endpoint("http", "127.0.0.1", listener.getsockname()[1], "")
    listener.close()


def behind(endpoint: Endpoint, tmp_path, *faults: dict) -> tuple[PlantedSurroundings, Endpoint]:
    surroundings = PlantedSurroundings(READ.validate_python(list(faults)))
    return surroundings, surroundings.begin(endpoint, tmp_path)


def asked(endpoint: Endpoint, line: bytes, size: int) -> float:
    """Seconds until all of the answer is there."""
    with socket.create_connection((endpoint.host, endpoint.port)) as connection:
        begin = time.monotonic()
        connection.sendall(line)
        answer = b""
        while len(answer) < size:
            answer += connection.recv(65_536)
        return time.monotonic() - begin


@pytest.mark.server
def test_a_network_delays_both_ways_and_is_as_narrow_as_it_says(echo, tmp_path):
    fault = {"fault": "network", "delay_ms": 40, "kib_per_s": 256, "share": 0.5}
    surroundings, target = behind(echo, tmp_path, fault)
    try:
        assert target.port != echo.port
        # Of two connections the second one is hit; the check that the proxy listens was the first.
        assert asked(target, b"a", 1) >= 0.08
        assert asked(target, b"a", 1) < 0.08
        assert asked(target, b"much", 65_536) >= 0.08 + 64 / 256 * 0.9
    finally:
        surroundings.end()
    with pytest.raises(OSError):
        asked(target, b"a", 1)


@pytest.mark.server
def test_a_slow_router_holds_requests_and_no_answers(echo, tmp_path):
    surroundings, target = behind(echo, tmp_path, {"fault": "slow_router", "ms": 150})
    try:
        assert 0.15 <= asked(target, b"a", 1) < 0.3 and 0.15 <= asked(target, b"much", 65_536) < 0.3
    finally:
        surroundings.end()


@pytest.mark.server
def test_a_starved_router_stands_still_and_the_load_does_not(tmp_path):
    router, load = (subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2))
    fault = {"fault": "starved_router", "pause_ms": 400, "every_ms": 401}
    surroundings = PlantedSurroundings(READ.validate_python([fault]))
    try:
        surroundings.begin(Endpoint("http", "127.0.0.1", 1, ""), tmp_path, router.pid)
        surroundings.loading(load.pid)
        surroundings.sending()
        process, deadline = psutil.Process(router.pid), time.monotonic() + 5
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.status() == psutil.STATUS_STOPPED != psutil.Process(load.pid).status()
        surroundings.end()
        assert process.status() != psutil.STATUS_STOPPED
    finally:
        surroundings.end()
        for child in (router, load):
            child.kill()
            child.wait()


@pytest.mark.server
def test_a_neighbour_and_pauses_end_with_the_run_and_leave_the_load_going(tmp_path):
    load = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    faults = [
        {"fault": "noisy_neighbour", "processes": 2, "duty": 0.1},
        {"fault": "starved_load_generator", "pause_ms": 400, "every_ms": 401},
    ]
    surroundings, _ = behind(Endpoint("http", "127.0.0.1", 1, ""), tmp_path, *faults)
    before = {child.pid for child in psutil.Process().children()}
    try:
        surroundings.loading(load.pid)
        surroundings.sending()
        children = [child for child in psutil.Process().children() if child.pid not in before]
        assert len(children) == 3
        process, deadline = psutil.Process(load.pid), time.monotonic() + 5
        while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.status() == psutil.STATUS_STOPPED
        surroundings.end()
        assert process.status() != psutil.STATUS_STOPPED
        assert not any(child.is_running() for child in children)
    finally:
        surroundings.end()
        os.kill(load.pid, signal.SIGKILL)
        load.wait()


PARENT = """
import sys, time
from pathlib import Path
from sojourn.loadgen.faults.planted import NoisyNeighbour
from sojourn.loadgen.faults.surroundings import PlantedSurroundings
from sojourn.loadgen.target.endpoint import Endpoint
surroundings = PlantedSurroundings([NoisyNeighbour(fault="noisy_neighbour", duty=0.1)])
surroundings.begin(Endpoint("http", "127.0.0.1", 1, ""), Path(sys.argv[1]))
surroundings.sending()
print(surroundings._children[0].pid, flush=True)
time.sleep(60)
"""


@pytest.mark.server
def test_a_neighbour_ends_with_its_parent_however_that_ends(tmp_path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE)
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=5)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_burst_of_profiled_steps_is_asked_for_once_and_none_after_the_end():
    asked = []

    class Server(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body["steps"], self.headers["x-team"]))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        endpoint = Endpoint("http", "127.0.0.1", server.server_port, "", headers={"x-team": "a"})
        burst, ended_first = KernelBurst(after_s=0.01), KernelBurst(after_s=60)
        for each in (burst, ended_first):
            each.start(endpoint)
        deadline = time.monotonic() + 5
        while not asked and time.monotonic() < deadline:
            time.sleep(0.01)
        for each in (burst, ended_first):
            each.end()
        server.shutdown()
    assert asked == [("/debug/profile", 30, "a")]  # with the headers of the target
