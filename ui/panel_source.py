"""What a panel of a Grafana dashboard asks a Prometheus for, with the dashboard's variables filled in."""

import json
import math
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import yaml

from sojourn.live.watch.fetch import fetch
from sojourn.metrics.errors import RunDataError, ServerError

TIMEOUT_S = 10.0
POINTS = 240  # of a line, at most
EVERY = ".+"
Json = dict[str, Any]
_LABEL_VALUES = re.compile(r"label_values\((.+), *(\w+)\)")


@dataclass(frozen=True, slots=True)
class Line:
    """One series of an answer. `seconds` are of the wall clock; a gap is NaN."""

    name: str
    labels: dict[str, str]
    seconds: list[float]
    values: list[float]


@dataclass(frozen=True, slots=True)
class Choices:
    """The chosen values of a dashboard's variables (none: all), and the time that it shows."""

    range_s: int
    values: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def filled(self, expr: str, scrape_s: float) -> str:
        """The expression with its variables replaced, as Grafana does: $__rate_interval holds at least four scrapes."""
        rate_s = max(math.ceil(self.step_s + scrape_s), math.ceil(4 * scrape_s))
        expr = expr.replace("$__rate_interval", f"{rate_s}s").replace("$__range", f"{self.range_s}s")
        return re.sub(r"\$(\w+)", lambda found: _pattern(self.values.get(found[1], ())), expr)

    @property
    def step_s(self) -> int:
        return max(1, math.ceil(self.range_s / POINTS))


def _pattern(values: tuple[str, ...]) -> str:
    """A regular expression of PromQL, within quotes."""
    return "|".join(re.escape(value).replace("\\", "\\\\") for value in values) or EVERY


def read_boards(folder: Path) -> dict[str, Json]:
    """uid → dashboard, of the JSON files in a folder. Raises RunDataError."""
    try:
        boards = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
        return {board["uid"]: board for board in boards}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDataError(f"the dashboards in {folder} cannot be read: {error}") from None


def variables(board: Json) -> list[str]:
    """The names that a reader chooses values of."""
    return [each["name"] for each in board["templating"]["list"] if each["type"] == "query"]


class PanelSource:
    """A Prometheus at `base`. Its methods raise ServerError where it gives no answer, or refuses a query."""

    def __init__(self, base: str):
        self._base = base.rstrip("/")
        config = self._get("status/config", {})["yaml"]
        self.scrape_s = _seconds(str((yaml.safe_load(config).get("global") or {}).get("scrape_interval", "1m")))

    def label_values(self, board: Json, name: str, choices: Choices) -> list[str]:
        """What a variable of the dashboard can be, given the choices so far."""
        query = next(each["query"] for each in board["templating"]["list"] if each["name"] == name)
        series, label = _LABEL_VALUES.fullmatch(query).groups()
        now = time.time()
        asked = {"match[]": choices.filled(series, self.scrape_s), "start": now - choices.range_s, "end": now}
        return sorted(self._get(f"label/{label}/values", asked))

    def lines(self, panel: Json, choices: Choices) -> list[Line]:
        """The series of all queries of a panel over the chosen time."""
        now = time.time()
        asked = {"start": now - choices.range_s, "end": now, "step": choices.step_s}
        found = []
        for target in panel["targets"]:
            expr = choices.filled(target["expr"], self.scrape_s)
            for series in self._get("query_range", {**asked, "query": expr})["result"]:
                found.append(_line(series, target, choices.step_s))
        return found

    def events(self, board: Json, choices: Choices) -> list[tuple[float, str, str]]:
        """When something began, what, and its colour, by the dashboard's annotations. What went on already when the
        shown time began is left out."""
        found, shown_s = [], time.time() - choices.range_s + 1.5 * choices.step_s
        for each in board.get("annotations", {}).get("list", ()):
            target = {
                "expr": each["target"]["expr"],
                "legendFormat": f"{each['titleFormat']}. {each['textFormat']}",
                "refId": "",
            }
            for line in self.lines({"targets": [target]}, choices):
                for before, second, value in zip([math.nan, *line.values], line.seconds, line.values, strict=False):
                    if math.isnan(before) and not math.isnan(value) and second > shown_s:
                        found.append((second, line.name, each["iconColor"]))
        return sorted(found)

    def alerts(self) -> list[Json]:
        """The alerts that are pending or firing."""
        return self._get("alerts", {})["alerts"]

    def _get(self, path: str, asked: dict[str, Any]) -> Any:
        status, body = fetch(f"{self._base}/api/v1/{path}?{urlencode(asked)}", timeout_s=TIMEOUT_S)
        try:
            answer = json.loads(body)
            if answer["status"] == "success":
                return answer["data"]
            raise ServerError(f"the Prometheus at {self._base} refuses a query: {answer.get('error')}")
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{self._base} does not answer as a Prometheus does (HTTP {status}: {error!r})") from None


def _line(series: Json, target: Json, step_s: int) -> Line:
    seconds: list[float] = []
    values: list[float] = []
    for second, value in series["values"]:
        if seconds and second - seconds[-1] > 1.5 * step_s:  # a gap that no line should bridge
            seconds.append(seconds[-1] + step_s)
            values.append(math.nan)
        seconds.append(float(second))
        values.append(float(value))
    labels = series["metric"]
    name = re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), target["legendFormat"])
    return Line(name, labels | {"refId": target["refId"]}, seconds, values)


def _seconds(text: str) -> float:
    """A duration of Prometheus, such as 5s or 1m30s."""
    parts = re.findall(r"([\d.]+)(ms|s|m|h)", text)
    return sum(float(number) * {"ms": 0.001, "s": 1, "m": 60, "h": 3600}[unit] for number, unit in parts) or 60.0
