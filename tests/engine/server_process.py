"""Starts the real server as a process, as a user would, and ends it by its id."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil


@dataclass
class Running:
    """A served model."""

    url: str
    process: subprocess.Popen
    log: Path

    def core_pid(self) -> int:
        """Of the process that computes or loads; a spare has no model yet."""
        children = psutil.Process(self.process.pid).children()
        return next(child.pid for child in children if child.name() == "sojourn-core")

    def gauge(self, name: str) -> float:
        """The first sample of a metric."""
        page = httpx.get(f"{self.url}/metrics").text
        line = next(line for line in page.splitlines() if line.startswith(f"{name}{{") or line.startswith(f"{name} "))
        return float(line.rsplit(" ", 1)[1])

    def wait_ready(self, timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/ready").status_code == 200:
                    return
            time.sleep(0.1)
        raise AssertionError(f"not ready in {timeout_s} s: {self.log.read_text()}")


@contextlib.contextmanager
def serving(
    folder: Path, model: str = "tiny-model", *options: str, environment: dict[str, str] | None = None
) -> Iterator[Running]:
    """Until the block ends. `environment` is added to that of this process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / f"server-{port}.log"
    fixed = ("--port", str(port), "--threads", "1", "--no-spare-core")  # which would cost each test a second
    command = [sys.executable, "-m", "sojourn", "serve", model, *fixed, *options]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | (environment or {})
        )
    running = Running(f"http://127.0.0.1:{port}", process, log)
    try:
        running.wait_ready()
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                raise AssertionError(f"the server did not end on SIGTERM: {log.read_text()}") from None


def post(server: Running, path: str = "/v1/completions", **body) -> httpx.Response:
    """A completion, with whatever `body` changes."""
    return httpx.post(f"{server.url}{path}", json={"model": "tiny-model", "prompt": "The function"} | body, timeout=30)


def wait_for(condition, timeout_s: float = 10):
    """What the condition became, once it holds."""
    deadline = time.monotonic() + timeout_s
    while not (met := condition()):
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
    return met


def ended_request(server, request_id: str) -> dict:
    """The server's record of a request. It is written after the client has its answer, so it is waited for."""
    url = f"{server.url}/debug/requests/{request_id}"
    wait_for(lambda: httpx.get(url).status_code == 200)
    return httpx.get(url).json()
