"""GET /metrics once a second into `scrapes.parquet`, for servers that report nothing else.

Beside the server's samples stand two of ours, named as Prometheus does: `up`, 0 after a failed scrape, and
`scrape_duration_seconds`. All carry the time on this host's monotonic clock at which the page had been read.
"""

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from sojourn.interop.sources.page import own_rows, rows_of
from sojourn.loadgen.target.endpoint import Endpoint, EndpointError, get
from sojourn.metrics.run.segments import write_segment

INTERVAL_S = 1.0
TIMEOUT_S = 5.0
LAST_SCRAPE_DELAY = 0.5  # intervals after the last byte: servers count the end of a request a little later


class Scraper:
    """Owns the thread that scrapes. A scrape that fails is recorded as such and counted in `failed`.

    A scrape that takes longer than the interval skips the turns that it missed, counted in `skipped`.
    """

    def __init__(
        self, endpoint: Endpoint, run_dir: Path | None, interval_s: float = INTERVAL_S,
        on_page: Callable[[list[dict[str, Any]]], None] = lambda _: None,
    ):  # fmt: skip
        """Without a run directory nothing is recorded; `on_page` gets the rows of each page, in the thread."""
        self._on_page = on_page
        self.first: list[dict[str, Any]] = []  # rows of the page before the load
        self.failed = 0
        self.skipped = 0
        self._endpoint = endpoint
        self._run_dir = run_dir
        self._interval_s = interval_s
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)

    def start(self) -> bool:
        """Scrapes once, before anything is sent, and starts the thread. False, without a record, if /metrics cannot be
        read."""
        try:
            self.first = scrape(self._endpoint)
            self._write(self.first)
        except (EndpointError, OSError, ValueError):
            return False
        self._thread.start()
        return True

    def stop(self) -> None:
        """Scrapes a last time, so that counters cover the whole run. May be called without a start."""
        if self._thread.ident is not None:
            time.sleep(LAST_SCRAPE_DELAY * self._interval_s)
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
            now_ns = time.monotonic_ns()
            with suppress(OSError, pa.ArrowException):  # a full disk: `failed` has counted it
                self._write(own_rows(now_ns, up=0, took_s=(now_ns - began_ns) / 1e9))

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._on_page(rows)
        if self._run_dir is None:
            return
        write_segment(self._run_dir, "scrapes", rows, f"{time.time_ns():020d}-{os.getpid()}")


def scrape(endpoint: Endpoint) -> list[dict[str, Any]]:
    """One row a sample, ours included. Raises EndpointError without a server, ValueError if the page is no Prometheus
    text."""
    began_ns = time.monotonic_ns()
    status, body = get(endpoint, "/metrics", timeout_s=TIMEOUT_S)
    if status != 200:
        raise ValueError(f"HTTP {status}")
    now_ns = time.monotonic_ns()
    return rows_of(body, now_ns, took_s=(now_ns - began_ns) / 1e9)
