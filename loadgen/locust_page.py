"""Goodput, TTFT, TPOT and ITL on Locust's own page: a table of its own and charts below Locust's.

Locust's totals count requests. A latency of tokens is no request, so none is fired as one. The page uses what Locust
documents for extensions: `template_args` and routes of its Flask app. `locust_charts.js` draws the charts.
"""

import json
import subprocess
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gevent
from flask import jsonify, send_file
from flask import request as http_request
from gevent.subprocess import PIPE
from gevent.subprocess import Popen as GeventPopen

TAB = {"title": "Goodput", "key": "sojourn"}
COLUMNS = {
    "klass": "Class", "ended": "# Ended", "good": "# Good", "failed": "# Failed", "attainment": "Good (%)",
    "goodput": "Goodput (req/s)", "tokens": "Output tokens/s", "ttft50": "TTFT p50 (ms)", "ttft90": "TTFT p90 (ms)",
    "tpot50": "TPOT p50 (ms)", "tpot90": "TPOT p90 (ms)", "itl50": "ITL p50 (ms)", "itl99": "ITL p99 (ms)",
}  # fmt: skip
COUNTS = ("ended", "good", "failed", "tokens")
PERCENTILES = {"TTFT": (50, 90), "TPOT": (50, 90), "ITL": (50, 99)}
TICK_S = 2.0  # between two points of a chart
WINDOW_S = 10.0  # that a point covers
MOST_POINTS = 5400  # three hours; the oldest go first
SCRIPT = Path(__file__).with_name("locust_charts.js")


def percentile(counts: Counter[float], percent: float) -> float | None:
    """The smallest value that this percentage of the samples does not exceed; None without samples."""
    needed = percent / 100 * counts.total()
    for value in sorted(counts):
        needed -= counts[value]
        if needed <= 0:
            return value
    return None


@dataclass(slots=True)
class Figures:
    """Counts of requests, and for each latency the number of samples by rounded ms."""

    counts: Counter[str] = field(default_factory=Counter)
    latencies: dict[str, Counter[float]] = field(default_factory=lambda: {kind: Counter() for kind in PERCENTILES})

    def add(self, found: dict[str, Any]) -> None:
        self.counts.update({name: found[name] for name in COUNTS})
        for kind, counts in self.latencies.items():
            for value, count in found[kind]:
                counts[value] += count

    def percentiles(self) -> dict[str, float | None]:
        return {
            f"{kind.lower()}{percent}": percentile(self.latencies[kind], percent)
            for kind, percents in PERCENTILES.items() for percent in percents
        }  # fmt: skip


class GoodputPage:
    """Owns the figures by class of the run under way, and the points of its charts."""

    def __init__(self, environment, *, replays: bool):
        """`replays`: a scenario says when requests are sent, so the page shows no users."""
        self._environment = environment
        self._classes: dict[str, Figures] = {}
        self._recent: deque[tuple[float, dict[str, Any]]] = deque()
        self._points: deque[dict[str, Any]] = deque(maxlen=MOST_POINTS)
        self._began = self._last = self._ended = 0.0  # `_last`: when the last requests were heard of
        self._reader: GeventPopen | None = None
        self._ticking: gevent.Greenlet | None = None
        self.message = ""  # of the last start: why it was refused, or where it is recorded
        self._is_fault = False
        if environment.web_ui:
            self._extend(environment.web_ui, replays)

    def begin(self) -> None:
        self._classes, self.message = {}, ""
        self._recent.clear()
        self._points.clear()
        self._began, self._last, self._ended = time.monotonic(), 0.0, 0.0

    def end(self, message: str, is_fault: bool) -> None:
        """`message` stands on every tab; a fault also among Locust's failures."""
        self._ended, self.message, self._is_fault = self._last or time.monotonic(), message, is_fault

    def follow(self, run_dir: Path, objectives: list[dict[str, Any]]) -> None:
        """Reads what is recorded on this host, in another process, until `unfollow`."""
        self._began = self._began or time.monotonic()
        words = (str(run_dir.resolve()), json.dumps(objectives))
        command = [sys.executable, "-m", "sojourn.loadgen.record.live_events", *words]
        root = str(Path(__file__).parents[1])
        self._reader = GeventPopen(command, stdout=PIPE, stderr=subprocess.DEVNULL, cwd=root)
        gevent.spawn(self._read, self._reader)
        self._ticking = gevent.spawn(self._tick)

    def unfollow(self) -> None:
        """After the last record: leaves the reader time to see it."""
        if self._reader is not None:
            gevent.sleep(2.0)
            self._reader.terminate()
            self._reader = None
        if self._ticking is not None:
            self._ticking.kill(block=False)
            self._ticking = None

    def _read(self, reader: GeventPopen) -> None:
        for line in reader.stdout:
            self.take(json.loads(line))

    def take(self, line: dict[str, dict[str, Any]]) -> None:
        """Class → its requests that ended since the last line, as `live_events` has them."""
        self._last = time.monotonic()
        for klass, found in line.items():
            self._classes.setdefault(klass, Figures()).add(found)
            self._recent.append((self._last, found))

    def _tick(self) -> None:
        while True:
            gevent.sleep(TICK_S)
            self._points.append(self.point())

    def point(self) -> dict[str, Any]:
        """The last WINDOW_S over all classes, by the moment at which requests ended."""
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - WINDOW_S:
            self._recent.popleft()
        seconds = max(TICK_S, min(WINDOW_S, now - self._began))
        window = Figures()
        for _, found in self._recent:
            window.add(found)
        rates = {f"{name}_rps": round(window.counts[name] / seconds, 3) for name in ("ended", "good")}
        tokens = round(window.counts["tokens"] / seconds, 1)
        return {"time": round(time.time(), 1), **rates, "tokens_per_s": tokens, **window.percentiles()}

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the tab, one per class. Rates are since the start."""
        seconds = max(1.0, (self._ended or time.monotonic()) - self._began)
        rows = []
        for klass, figures in sorted(self._classes.items()):
            counts = {name: figures.counts[name] for name in COUNTS}
            row = {"klass": klass, **counts, "attainment": round(100 * counts["good"] / max(1, counts["ended"]), 1)}
            row |= {"goodput": round(counts["good"] / seconds, 2), "tokens": round(counts["tokens"] / seconds, 1)}
            rows.append(row | figures.percentiles())
        return rows

    def print_rows(self) -> None:
        """The same for a terminal, below Locust's statistics."""
        rows = [[str(each) for each in COLUMNS.values()]]
        rows += [["-" if row[key] is None else str(row[key]) for key in COLUMNS] for row in self.rows()]
        if len(rows) > 1:
            print("\n".join(f"{title:16} " + " ".join(f"{row[place]:>12}" for row in rows[1:])
                            for place, title in enumerate(rows[0])), flush=True)  # fmt: skip

    def _extend(self, web_ui, replays: bool) -> None:
        structure = [{"key": key, "title": title} for key, title in COLUMNS.items()]
        web_ui.template_args |= {
            "extended_tabs": [TAB], "extended_tables": [{"key": TAB["key"], "structure": structure}],
            "sojourn": {"replays": replays},
        }  # fmt: skip
        base = (self._environment.parsed_options.web_base_path or "").rstrip("/")

        @web_ui.app.route(f"{base}/sojourn/state")
        @web_ui.auth_required_if_enabled
        def sojourn_state():
            return jsonify({"points": list(self._points), "message": self.message, "is_fault": self._is_fault})

        @web_ui.app.route(f"{base}/sojourn/charts.js")
        @web_ui.auth_required_if_enabled
        def sojourn_script():
            return send_file(SCRIPT, mimetype="text/javascript")

        @web_ui.app.after_request
        def extend(response):
            if http_request.endpoint == "locust.index" and response.mimetype == "text/html":
                script = '<script src="./sojourn/charts.js"></script></body>'
                response.set_data(response.get_data(as_text=True).replace("</body>", script))
            elif http_request.endpoint == "locust.request_stats" and response.is_json:
                document = response.get_json()
                if "extended_stats" not in document:  # Locust gives one response twice within two seconds
                    response.set_data(json.dumps(self._extended(document)))
            return response

    def _extended(self, document: dict[str, Any]) -> dict[str, Any]:
        document["extended_stats"] = [{"key": TAB["key"], "data": self.rows()}]
        if self.message and self._is_fault:
            fault = {"name": "Sojourn", "method": "", "error": self.message, "occurrences": 1}
            document["errors"] = [fault, *document.get("errors", [])]
        return document
