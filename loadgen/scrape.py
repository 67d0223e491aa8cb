"""GET /metrics once a second into `scrapes.parquet`, for servers that tell nothing else about their inside."""

import os
import threading
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from loadgen.endpoint import Endpoint, EndpointError, get
from metrics.recorder import write_segment
from metrics.records import SCHEMAS

INTERVAL_S = 1.0


class Scraper:
    """Owns the thread that scrapes. A scrape that fails is left out and counted in `failed`."""

    def __init__(self, endpoint: Endpoint, run_dir: Path):
        self.failed = 0
        self._endpoint = endpoint
        self._run_dir = run_dir
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="scraper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Scrapes a last time, so that counters cover the whole run."""
        if self._thread.ident is not None:
            self._stopping.set()
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while True:
            stopping = self._stopping.wait(max(0.0, due - time.monotonic()))
            due += INTERVAL_S
            try:
                rows = scrape(self._endpoint)
                name = f"{time.time_ns():020d}-{os.getpid()}"
                write_segment(self._run_dir, "scrapes", rows, name, SCHEMAS["scrapes"])
            except (EndpointError, OSError, ValueError):
                self.failed += 1
            if stopping:
                return


def scrape(endpoint: Endpoint) -> list[dict[str, Any]]:
    """One row a sample. Raises EndpointError where nobody answers, ValueError where it is not Prometheus' text."""
    status, body = get(endpoint, "/metrics", timeout_s=5.0)
    if status != 200:
        raise ValueError(f"HTTP {status}")
    now_ns = time.monotonic_ns()
    families = text_string_to_metric_families(body.decode("utf-8", "replace"))
    return [
        {"ns": now_ns, "name": sample.name, "labels": list(sample.labels.items()), "value": float(sample.value)}
        for family in families
        for sample in family.samples
    ]


def has_metrics(endpoint: Endpoint) -> bool:
    """Whether the server has a /metrics that can be read."""
    try:
        return bool(scrape(endpoint))
    except (EndpointError, ValueError):
        return False
