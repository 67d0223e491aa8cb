"""A Prometheus of our own beside whatever it scrapes: Debian's binary, in a folder of a test."""

import contextlib
import json
import math
import re
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import yaml

from sojourn.dashboards.build import contents
from sojourn.dashboards.rules import rules

DEADLINE_S = 25


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ask(base: str, expr: str, timeout_s: float = 5) -> list[dict]:
    """What an instant query finds."""
    query = urllib.parse.urlencode({"query": expr})
    with urllib.request.urlopen(f"{base}/api/v1/query?{query}", timeout=timeout_s) as answer:
        return json.load(answer)["data"]["result"]


def figures(base: str, expr: str) -> list[float]:
    """The values of an instant query."""
    return [float(series["value"][1]) for series in ask(base, expr)]


def as_grafana_asks(expr: str, window: str = "10s") -> str:
    replaced = expr.replace("$__rate_interval", window).replace("$__range", "1m")
    return re.sub(r"\$\w+", ".+", replaced)


def draws(numbers: list[float]) -> bool:
    """NaN beside figures is Grafana's gap (a kind of which none happened has no quantile), NaN alone an empty panel."""
    finite = [number for number in numbers if not math.isnan(number)]
    return bool(finite) and all(0 <= number < math.inf for number in finite)


@contextlib.contextmanager
def scraping(folder: Path, *targets: str, scrapes: int) -> Iterator[str]:
    """Its base URL, once it has scraped our server among the targets (host:port) so many times, once a second."""
    config = yaml.safe_load(contents()["prometheus.yaml"])
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [*targets]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    fast = json.loads(
        json.dumps(rules()).replace('"15s"', '"1s"').replace("[5m]", "[10s]")
    )  # of the neutral names, too
    (folder / "rules.yaml").write_text(yaml.safe_dump(fast))
    port = free_port()
    process = subprocess.Popen(
        ["prometheus", f"--config.file={folder}/prometheus.yaml", f"--storage.tsdb.path={folder}/data",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
        stdout=subprocess.DEVNULL, stderr=(folder / "log").open("w"), cwd=folder,
    )  # fmt: skip
    try:
        base = f"http://127.0.0.1:{port}"
        _wait_for_scrapes(process, base, scrapes, folder)
        yield base
    finally:
        process.terminate()
        process.wait(10)


def _wait_for_scrapes(process: subprocess.Popen, base: str, scrapes: int, folder: Path) -> None:
    give_up = time.monotonic() + DEADLINE_S
    stored = f"min(count_over_time(sojourn_request_running[1m])) >= {scrapes}"
    while True:
        assert process.poll() is None, (folder / "log").read_text()
        with contextlib.suppress(OSError):  # it may not listen yet
            if ask(base, stored):
                return
        assert time.monotonic() < give_up, f"too few scrapes; {(folder / 'log').read_text()}"
        time.sleep(0.2)
