"""The benchmark's client as a process: it starts once and takes one order after the other."""

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from typing import Any

from tests.bench.contenders import ROOT, environment
from tests.bench.results import BenchError
from tests.bench.servers import HOST, Server
from tests.bench.workloads import Workload

CLIENT_SECONDS = 1800  # that one order may take
STOP_SECONDS = 5


class Client:
    """A context manager: the process lives in it."""

    def __enter__(self) -> "Client":
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.client"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._errors, text=True, cwd=ROOT, env=environment(),
        )  # fmt: skip
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # what a dead client did not read
            self._process.stdin.close()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def run(self, server: Server, workload: Workload, concurrency: int, *, stream: bool) -> dict[str, Any]:
        """What the client measured. Raises BenchError where the server did other work than it was asked for."""
        order = {
            "host": HOST, "port": server.port, "model": server.model, "concurrency": concurrency, "stream": stream,
            "prompts": workload.prompts, "output_lens": workload.output_lens,
        }  # fmt: skip
        limit = threading.Timer(CLIENT_SECONDS, self._process.kill)
        limit.start()
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            told = self._process.stdout.readline()
        except BrokenPipeError:
            told = ""
        finally:
            limit.cancel()
        if not told:
            raise BenchError(f"the client of {server.name} ended: {self._last_words()}")
        answer = json.loads(told)
        if answer["fault"]:
            raise BenchError(f"{server.name}, {workload.name}: {answer['fault']}")
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().strip().splitlines()
        return said[-1] if said else f"exit code {self._process.returncode}"


def run_client(server: Server, workload: Workload, concurrency: int, *, stream: bool) -> dict[str, Any]:
    """`Client.run` of a process that does nothing else."""
    with Client() as client:
        return client.run(server, workload, concurrency, stream=stream)
