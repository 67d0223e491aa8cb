"""GET /metrics once a second into `scrapes.parquet`, for servers that tell nothing else about their inside.

Beside the server's samples stand two of ours, as Prometheus has them: `up`, 0 where the scrape failed, and
`scrape_duration_seconds`. All carry the moment of this host's monotonic clock at which the page had been read.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
from prometheus_client.parser import text_string_to_metric_families

from loadgen.target.endpoint import Endpoint, EndpointError, get
from metrics.records import SCHEMAS
from metrics.run.segments import write_segment
from metrics.sources.scrapes import DURATION, UP

INTERVAL_S = 1.0
TIMEOUT_S = 5.0
SETTLE = 0.5  # of an interval, after the last byte was read: servers book the end of a request a little after it


class Scraper:
    """Owns the thread that scrapes. A scrape that fails is recorded as such and counted in `failed`.

    One that takes longer than the interval leaves out the turns that it missed, counted in `skipped`: a server that
    is slow to answer is not asked more often for it.
    """

    def __init__(self, endpoint: Endpoint, run_dir: Path, interval_s: float = INTERVAL_S):
        self.failed = 0
        self.skipped = 0
        self._endpoint = endpoint
        self._run_dir = run_dir
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)

    def start(self) -> bool:
        """Scrapes a first time, before anything is sent, and goes on in its thread.

        Gives False, and records nothing, where the server has no /metrics that can be read.
        """
        try:
            self._write(scrape(self._endpoint))
        except (EndpointError, OSError, ValueError):
            return False
        self._thread.start()
        return True

    def stop(self) -> None:
        """Scrapes a last time, so that counters cover the whole run. May be called without a start."""
        if self._thread.ident is not None:
            time.sleep(SETTLE * self._interval_s)
            self._stopping.set()
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic() + self._interval_s
        while True:
            stopping = self._stopping.wait(max(0.0, due - time.monotonic()))
            self._scrape()
            if stopping:
                return
            due += self._interval_s
            missed = int(max(0.0, time.monotonic() - due) // self._interval_s)
            self.skipped += missed
            due += missed * self._interval_s

    def _scrape(self) -> None:
        began_ns = time.monotonic_ns()
        try:
            self._write(scrape(self._endpoint))
        except (EndpointError, OSError, ValueError, pa.ArrowException):
            self.failed += 1
            self._write_failure(began_ns)

    def _write_failure(self, began_ns: int) -> None:
        now_ns = time.monotonic_ns()
        try:
            self._write(_own(now_ns, up=0, took_s=(now_ns - began_ns) / 1e9))
        except (OSError, pa.ArrowException):  # the disk is what failed: `failed` has counted it
            return

    def _write(self, rows: list[dict[str, Any]]) -> None:
        write_segment(self._run_dir, "scrapes", rows, f"{time.time_ns():020d}-{os.getpid()}", SCHEMAS["scrapes"])


def scrape(endpoint: Endpoint) -> list[dict[str, Any]]:
    """One row a sample, ours included.

    Raises EndpointError where nobody answers, ValueError where it is not Prometheus' text.
    """
    began_ns = time.monotonic_ns()
    status, body = get(endpoint, "/metrics", timeout_s=TIMEOUT_S)
    if status != 200:
        raise ValueError(f"HTTP {status}")
    now_ns = time.monotonic_ns()
    return rows_of(body, now_ns, took_s=(now_ns - began_ns) / 1e9)


def rows_of(page: bytes, ns: int, took_s: float) -> list[dict[str, Any]]:
    """The rows of a page that was read at a moment. Raises ValueError where it is not Prometheus' text."""
    rows = [
        {"ns": ns, "name": sample.name, "labels": list(sample.labels.items()), "value": float(sample.value)}
        for family in text_string_to_metric_families(page.decode("utf-8", "replace"))
        for sample in family.samples
    ]
    if not rows:
        raise ValueError("no samples")
    return rows + _own(ns, up=1, took_s=took_s)


def _own(ns: int, up: int, took_s: float) -> list[dict[str, Any]]:
    pairs = ((UP, up), (DURATION, took_s))
    return [{"ns": ns, "name": name, "labels": [], "value": float(value)} for name, value in pairs]
