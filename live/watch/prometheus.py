"""The scrapes that a Prometheus holds of engines, raw: each target becomes a server with its history.

An instant query of a range selector gives every sample with the moment of its scrape (HTTP API, /api/v1/query). So
nothing is interpolated, and the samples of one scrape have one moment.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any
from urllib.parse import urlencode

from sojourn.interop.sources.page import own_rows
from sojourn.interop.sources.registry import SOURCES
from sojourn.interop.sources.scrapes import OPEN_FILES, STARTED
from sojourn.live.watch.fetch import fetch
from sojourn.metrics.errors import ServerError

HISTORY_S = 300  # that the first query asks for
TIMEOUT_S = 20.0
REPLICA = "replica"  # in labels such as prometheus_replica, which a pair of them adds
WATCH = "sojourn_watch_"  # what a watch exports of servers is no server
OF_THE_PROCESS = (STARTED, OPEN_FILES)  # and of any other that uses prometheus_client
SCRAPE_LABELS = ("__name__", "instance", "job")  # of the scrape, not of the engine's own samples
Target = tuple[str, str]  # job, instance


@dataclass(frozen=True, slots=True)
class HeldScrape:
    """What a Prometheus scraped of one target at one moment; ns since 1970."""

    target: Target
    ns: int
    rows: list[dict[str, Any]]


def is_prometheus(base: str) -> bool:
    """Whether a Prometheus, or what speaks its HTTP API, answers there. Raises ServerError without an answer."""
    status, body = fetch(f"{base}/api/v1/query?query=1", timeout_s=5.0, named=base)
    try:
        return status == 200 and json.loads(body).get("status") == "success"
    except (ValueError, AttributeError):
        return False


def clock_ns(base: str) -> int:
    """The present moment by the clock of the Prometheus, which its scrapes have: ns since 1970. Raises ServerError."""
    try:
        found = _answer(base, "time()")
        moment = found[0] if isinstance(found[0], int | float) else found[0]["value"][0]  # VictoriaMetrics: a vector
        return round(float(moment) * 1e9)
    except (ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{base} does not tell its time as a Prometheus does ({error!r})") from None


def held_scrapes(base: str, seconds: float, select: str = "", until_s: float | None = None) -> list[HeldScrape]:
    """The scrapes of the last seconds, or of those before a moment (seconds since 1970), in order of time. `select`:
    further label matchers, such as `job="vllm"`.

    Raises ServerError.
    """
    prefixes = (f"{re.escape(source.prefix)}.+" for source in SOURCES)
    names = "|".join((*prefixes, *OF_THE_PROCESS, "ray_(vllm|sglang)[:_].+"))
    families = '__name__=~"' + names.replace("\\", "\\\\") + f'",__name__!~"{WATCH}.+"'
    matchers = ",".join(filter(None, (families, select.strip().strip("{}"))))
    result = _answer(base, f"{{{matchers}}}[{max(1, round(seconds))}s]", until_s)
    try:
        return list(_scrapes(result))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ServerError(f"{base} does not answer as a Prometheus does ({error!r})") from None


def interval_s(scrapes: list[HeldScrape]) -> float:
    """The time between two scrapes of a target, as most of them are; 15 s where that is not known."""
    by_target: dict[Target, list[int]] = {}
    for scrape in scrapes:
        by_target.setdefault(scrape.target, []).append(scrape.ns)
    gaps = [later - before for times in by_target.values() for before, later in pairwise(times)]
    return median(gaps) / 1e9 if gaps else 15.0


def _answer(base: str, query: str, at_s: float | None = None) -> list[Any]:
    """The result of an instant query, of now or of a moment. Raises ServerError."""
    asked = {"query": query} | ({} if at_s is None else {"time": f"{at_s:.3f}"})
    status, body = fetch(f"{base}/api/v1/query?{urlencode(asked)}", timeout_s=TIMEOUT_S, named=base)
    try:
        answer = json.loads(body)
        if status != 200 or answer["status"] != "success":
            raise ServerError(f"the Prometheus at {base} refuses the query: {answer.get('error', f'HTTP {status}')}")
        return list(answer["data"]["result"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        why = repr(error) if status == 200 else f"HTTP {status}"
        raise ServerError(f"{base} does not answer as a Prometheus does ({why})") from None


def _of_one_replica(result: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what a second Prometheus of a pair scraped of the same target, at moments of its own. Values of such a
    label that share their moments are parts of one page, and stay."""
    moments: dict[tuple[Target, str], dict[str, set[float]]] = {}
    for series in result:
        labels = series["metric"]
        for name in labels:
            if REPLICA in name.lower():
                by_value = moments.setdefault(((labels.get("job", ""), labels.get("instance", "")), name), {})
                by_value.setdefault(labels[name], set()).update(float(moment) for moment, _ in series["values"])
    kept = {}
    for place, by_value in moments.items():
        times = list(by_value.values())
        if len(times) > 1 and sum(map(len, times)) == len(set().union(*times)):
            kept[place] = max(sorted(by_value), key=lambda value: len(by_value[value]))
    return [
        series for series in result
        if all(series["metric"].get(name) in (None, value) for (target, name), value in kept.items()
               if target == (series["metric"].get("job", ""), series["metric"].get("instance", "")))
    ]  # fmt: skip


def _scrapes(result: list[dict[str, Any]]) -> Iterator[HeldScrape]:
    rows: dict[tuple[int, Target], list[dict[str, Any]]] = {}
    engines = set()
    for series in _of_one_replica(result):
        labels = series["metric"]
        name, target = labels["__name__"], (labels.get("job", ""), labels.get("instance", ""))
        if name not in OF_THE_PROCESS:
            engines.add(target)
        own = sorted((key, value) for key, value in labels.items() if key not in SCRAPE_LABELS)
        for moment, value in series["values"]:
            ns = round(float(moment) * 1e3) * 1_000_000
            rows.setdefault((ns, target), []).append(
                {"ns": ns, "name": name, "labels": own, "value": float(value)}
            )  # fmt: skip
    for (ns, target), samples in sorted(rows.items()):
        if target in engines and any(sample["name"] not in OF_THE_PROCESS for sample in samples):
            yield HeldScrape(target, ns, samples + own_rows(ns, up=1, took_s=0.0))
