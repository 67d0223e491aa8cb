"""The benchmark's client as a process: it starts once and takes one order after the other."""

import sys
from pathlib import Path
from typing import Any

from bench.json_process import JsonProcess
from bench.results import BenchError
from bench.servers import HOST, Server
from bench.workloads import Workload

CLIENT_SECONDS = 1800  # that one order may take


class Client:
    """A context manager: the process lives in it."""

    def __enter__(self) -> "Client":
        self._process = JsonProcess("the client", [sys.executable, "-m", "bench.client"], CLIENT_SECONDS)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(
        self, server: Server, workload: Workload, concurrency: int, *, stream: bool, stamps: Path | None = None
    ) -> dict[str, Any]:
        """What the client measured. Raises BenchError where the server did other work than it was asked for.

        Into the file `stamps` goes when each text of each request was read, in nanoseconds: a list of lists.
        """
        order = {
            "host": HOST, "port": server.port, "model": server.model, "concurrency": concurrency, "stream": stream,
            "prompts": workload.prompts, "output_lens": workload.output_lens,
            "stamps": str(stamps) if stamps else None,
        }  # fmt: skip
        self._process.name = f"the client of {server.name}"
        answer = self._process.ask(order)
        if answer["fault"]:
            raise BenchError(f"{server.name}, {workload.name}: {answer['fault']}")
        return answer


def run_client(server: Server, workload: Workload, concurrency: int, *, stream: bool) -> dict[str, Any]:
    """`Client.run` of a process that does nothing else."""
    with Client() as client:
        return client.run(server, workload, concurrency, stream=stream)
