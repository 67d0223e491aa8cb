"""The faults of client and machine of one run: their processes begin with it and end with it."""

import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sojourn.loadgen.faults.kernel_burst import KernelBurst
from sojourn.loadgen.faults.planted import (
    Network,
    NoisyNeighbour,
    Pauses,
    SlowRouter,
    StarvedRouter,
    SurroundingFault,
)
from sojourn.loadgen.target.endpoint import Endpoint
from sojourn.loadgen.target.processes import free_port, start, stop, tail
from sojourn.metrics.errors import ExperimentError

LOG = "faults.log"
PROXY_SECONDS = 10.0  # for a proxy to listen
FOREVER_S = 86_400.0


class PlantedSurroundings:
    """Owns the processes of the planted faults. `loadgen.run.experiment.Surroundings` says who calls what when.

    With `burst_after_s` some steps are profiled, so long after the first request.
    """

    def __init__(self, faults: Sequence[SurroundingFault], burst_after_s: float | None = None):
        self._faults = faults
        self._burst = None if burst_after_s is None else KernelBurst(burst_after_s)
        self._server: Endpoint | None = None
        self._children: list[subprocess.Popen] = []
        self._load_pid: int | None = None
        self._router_pid: int | None = None
        self._log = Path()

    def begin(self, endpoint: Endpoint, run_dir: Path, router_pid: int | None = None) -> Endpoint:
        self._log = run_dir / LOG
        self._server, self._router_pid = endpoint, router_pid
        for fault in self._faults:
            if isinstance(fault, Network):
                values = (fault.delay_ms, fault.jitter_ms, fault.kib_per_s or 0, fault.share, 2)
                endpoint = self._behind(endpoint, *values)
            elif isinstance(fault, SlowRouter):
                endpoint = self._behind(endpoint, fault.ms, 0, 0, 1, 1)
        return endpoint

    def loading(self, pid: int) -> None:
        self._load_pid = pid

    def sending(self) -> None:
        if self._burst is not None:
            self._burst.start(self._server)
        for fault in self._faults:
            if isinstance(fault, NoisyNeighbour):
                words = ("neighbour", fault.work, fault.duty, fault.from_s, fault.until_s or FOREVER_S)
                for _ in range(fault.processes):
                    self._start(*words)
            elif isinstance(fault, Pauses):
                pid = self._router_pid if isinstance(fault, StarvedRouter) else self._load_pid
                times = (fault.pause_ms, fault.every_ms, fault.from_s, fault.until_s or FOREVER_S)
                self._start("pauses", pid, *times)

    def end(self) -> None:
        if self._burst is not None:
            self._burst.end()
        while self._children:
            stop(self._children.pop())

    def _behind(self, endpoint: Endpoint, *values: float) -> Endpoint:
        """A proxy with these words of `loadgen.faults.network`."""
        port = free_port()
        proxy = self._start("network", port, endpoint.port, *values)
        deadline = time.monotonic() + PROXY_SECONDS
        while time.monotonic() < deadline and proxy.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return replace(endpoint, port=port)
            time.sleep(0.02)
        raise ExperimentError(f"the proxy of the planted network does not listen; its last lines:\n{tail(self._log)}")

    def _start(self, module: str, *words: object) -> subprocess.Popen:
        command = [sys.executable, "-m", f"sojourn.loadgen.faults.{module}", *map(str, words)]
        self._children.append(child := start(command, self._log))
        return child
