"""Runs the benchmark's client as a process of its own, so that it takes no time of the engine's process."""

import sys
from typing import Any

from bench.engines.servers import HOST, Server
from bench.json_process import JsonProcess
from bench.results import BenchError
from bench.workloads import Workload

CLIENT_SECONDS = 1800  # the longest a workload may take


def run_client(server: Server, workload: Workload, concurrency: int, *, stream: bool) -> dict[str, Any]:
    """What the client measured. Raises BenchError if the server did other work than the client asked for."""
    order = {
        "host": HOST, "port": server.port, "model": server.model, "concurrency": concurrency, "stream": stream,
        "prompts": workload.prompts, "output_lens": workload.output_lens,
    }  # fmt: skip
    process = JsonProcess(
        f"the client of {server.name}", [sys.executable, "-m", "bench.engines.client"], CLIENT_SECONDS
    )
    try:
        answer = process.request(order)
    finally:
        process.stop()
    if answer["fault"]:
        raise BenchError(f"{server.name}, {workload.name}: {answer['fault']}")
    return answer
