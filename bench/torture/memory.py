"""Whether a series of readings levels off or grows: the slope of its second half, with a stated bound."""

import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import psutil

from bench.torture.server import Server

MIB = 1 << 20


class Reading(msgspec.Struct, frozen=True):
    """The front and the core at one moment (`time.monotonic()`)."""

    at_s: float
    front_rss_bytes: int
    core_rss_bytes: int
    front_fds: int
    core_fds: int
    front_threads: int
    core_threads: int


def read(server: Server) -> Reading | None:
    """None while there is no core."""
    try:
        front, core = server.usage(), server.usage(server.core_pid())
    except (psutil.Error, OSError):
        return None
    return Reading(
        time.monotonic(), front.rss_bytes, core.rss_bytes, front.num_fds, core.num_fds, front.num_threads,
        core.num_threads,
    )  # fmt: skip


class Watch:
    """Reads every `seconds` in a thread, until the block ends."""

    def __init__(self, server: Server, seconds: float = 1.0):
        self.readings: list[Reading] = []
        self._server, self._seconds = server, seconds
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(self._seconds):
            if (reading := read(self._server)) is not None:
                self.readings.append(reading)

    def of(self, field: str) -> list[float]:
        return [getattr(reading, field) for reading in self.readings]


def growth_of_second_half(at: Sequence[float], values: Sequence[float]) -> float:
    """What a robust line (Theil and Sen: the median of all slopes) through the second half gains over that half."""
    half = max(0, min(len(at) // 2, len(at) - 3))
    times, found = np.asarray(at[half:], float), np.asarray(values[half:], float)
    if len(times) < 3:
        return 0.0
    step = max(1, len(times) // 300)
    times, found = times[::step], found[::step]
    above = np.triu_indices(len(times), 1)
    spans = times[above[1]] - times[above[0]]
    slopes = (found[above[1]] - found[above[0]])[spans > 0] / spans[spans > 0]
    return float(np.median(slopes) * (times[-1] - times[0]))
