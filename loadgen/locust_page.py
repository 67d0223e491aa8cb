"""Goodput and tokens on Locust's own page: its statistics get rows for TTFT, TPOT and ITL, and a tab shows goodput by
class. It uses what Locust documents for extensions: `events.request`, `template_args`.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gevent
from flask import request as http_request
from gevent.subprocess import PIPE
from gevent.subprocess import Popen as GeventPopen

TAB = {"title": "Goodput", "key": "sojourn"}
COLUMNS = {
    "klass": "Class", "ended": "# Ended", "good": "# Good", "failed": "# Failed", "attainment": "Good (%)",
    "goodput": "Goodput (req/s)", "tokens": "Output tokens/s", "ttft50": "TTFT p50 (ms)", "ttft90": "TTFT p90 (ms)",
    "tpot50": "TPOT p50 (ms)", "tpot90": "TPOT p90 (ms)",
}  # fmt: skip
COUNTS = ("ended", "good", "failed", "tokens")


class GoodputPage:
    """Owns the counts by class of the run under way."""

    def __init__(self, environment):
        self._environment = environment
        self._counts: dict[str, dict[str, int]] = {}
        self._began = self._ended = 0.0
        self._reader: GeventPopen | None = None
        self.message = ""  # of the last start: why it was refused, or where it is recorded
        if environment.web_ui:
            self._extend(environment.web_ui)

    def begin(self) -> None:
        self._counts, self.message = {}, ""
        self._began, self._ended = time.monotonic(), 0.0

    def end(self, message: str) -> None:
        self._ended, self.message = time.monotonic(), message

    def follow(self, run_dir: Path, objectives: list[dict[str, Any]]) -> None:
        """Reads what is recorded on this host, in another process, until `unfollow`."""
        self._began = self._began or time.monotonic()
        words = (str(run_dir.resolve()), json.dumps(objectives))
        command = [sys.executable, "-m", "sojourn.loadgen.record.live_events", *words]
        root = str(Path(__file__).parents[1])
        self._reader = GeventPopen(command, stdout=PIPE, stderr=subprocess.DEVNULL, cwd=root)
        gevent.spawn(self._read, self._reader)

    def unfollow(self) -> None:
        """After the last record: leaves the reader time to see it."""
        if self._reader is not None:
            gevent.sleep(2.0)
            self._reader.terminate()
            self._reader = None

    def _read(self, reader: GeventPopen) -> None:
        for line in reader.stdout:
            for klass, found in json.loads(line).items():
                counts = self._counts.setdefault(klass, dict.fromkeys(COUNTS, 0))
                for name in COUNTS:
                    counts[name] += found[name]
                for kind in ("TTFT", "TPOT", "ITL"):
                    for place, value in enumerate(found[kind]):
                        self._environment.events.request.fire(
                            request_type=kind, name=klass, response_time=value, response_length=0, exception=None,
                            context={},
                        )  # fmt: skip
                        if place % 50 == 49:
                            gevent.sleep(0)

    def rows(self) -> list[dict[str, Any]]:
        """One of the tab's rows a class. Rates are since the start."""
        seconds = max(1.0, (self._ended or time.monotonic()) - self._began)
        rows = []
        for klass, found in sorted(self._counts.items()):
            row = {"klass": klass, **found, "attainment": round(100 * found["good"] / max(1, found["ended"]), 1)}
            row |= {"goodput": round(found["good"] / seconds, 2), "tokens": round(found["tokens"] / seconds, 1)}
            for kind in ("TTFT", "TPOT"):
                entry = self._environment.runner.stats.get(klass, kind)
                for percent in (50, 90):
                    row[f"{kind.lower()}{percent}"] = entry.get_response_time_percentile(percent / 100)
            rows.append(row)
        return rows

    def _message_row(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """A row of Locust's statistics without figures: its first tab is where a reader looks."""
        like = rows[-1] if rows else {}
        zeros = {name: 0 for name, value in like.items() if isinstance(value, int | float)}
        return like | zeros | {"method": "Sojourn", "name": self.message, "safe_name": self.message}

    def _extend(self, web_ui) -> None:
        structure = [{"key": key, "title": title} for key, title in COLUMNS.items()]
        web_ui.template_args |= {
            "extended_tabs": [TAB], "extended_tables": [{"key": TAB["key"], "structure": structure}],
        }  # fmt: skip

        @web_ui.app.after_request
        def extend(response):
            if http_request.path == "/stats/requests" and response.is_json:
                document = response.get_json()
                document["extended_stats"] = [{"key": TAB["key"], "data": self.rows()}]
                if self.message:
                    document["stats"] = [self._message_row(document.get("stats", [])), *document.get("stats", [])]
                    document["errors"] = [
                        *document.get("errors", []),
                        {"name": "Sojourn", "method": "", "error": self.message, "occurrences": 1},
                    ]
                response.set_data(json.dumps(document))
            return response
