"""What the load generator got of the CPUs while it sent: a generator that waits for a core reads and sends late."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import psutil

from sojourn.metrics.machine.host import SAMPLE_SECONDS
from sojourn.metrics.machine.process_use import ProcessUse, process_use

# CPU seconds, nanoseconds in the run queue (sums over its processes), and the processes
Reading = tuple[float, int | None, frozenset[int]]


class LoadUse:
    """Readings of a load generator and its children, once a second from the first request on."""

    def __init__(
        self, pid: int, clock: Callable[[], float] = time.monotonic, read: Callable[[int], Reading] | None = None
    ):
        self._pid, self._clock, self._read = pid, clock, read or _read
        self._readings: list[tuple[float, Reading]] = []  # the first and the last
        self._busiest = 0.0
        self._pids: frozenset[int] = frozenset()

    def look(self) -> None:
        """Cheap if less than a second has passed."""
        now = self._clock()
        if self._readings and now - self._readings[-1][0] < SAMPLE_SECONDS:
            return
        with contextlib.suppress(psutil.Error):
            reading = self._read(self._pid)
            self._pids |= reading[2]
            if self._readings:
                before, (cpu, *_) = self._readings[-1]
                self._busiest = max(self._busiest, (reading[0] - cpu) / (now - before))
            self._readings = [*self._readings[:1], (now, reading)]

    def summary(self) -> dict[str, Any] | None:
        """What `run.json` says as `load_use`; None for a load of less than a second."""
        if len(self._readings) < 2:
            return None
        (begin, (cpu, queued, _)), (end, (cpu_then, queued_then, _)) = self._readings
        seconds = end - begin
        waited = None if queued is None or queued_then is None else (queued_then - queued) / 1e9 / seconds
        return {
            "seconds": round(seconds, 2),
            "cpu_cores": round((cpu_then - cpu) / seconds, 4),  # mean, in cores
            "cpu_cores_max": round(self._busiest, 4),  # of the busiest second
            "queued_share": None if waited is None else round(waited, 4),  # run-queue time of its threads / time
            "pids": sorted(self._pids),
        }


def _read(pid: int) -> Reading:
    """Raises psutil.Error where the process is gone."""
    process = psutil.Process(pid)
    cpu, uses, family = 0.0, [], (process, *process.children(recursive=True))
    for each in family:
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            cpu += times.user + times.system
            uses.append(process_use(each.pid))
    known: list[ProcessUse] = [use for use in uses if use is not None]
    queued_ns = sum(use.queued_ns for use in known) if known else None
    return cpu, queued_ns, frozenset(each.pid for each in family)
