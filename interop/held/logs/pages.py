"""Pages of /metrics that somebody saved: one shows means since the server's start, two what lies between them.

A file may hold several pages after each other, with or without a date before each. A page has no moment of its own:
without one its rows stand at 0. Its last line is left out where no line end follows, since a number may be cut there.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, cast

import pandas as pd

from sojourn.interop.held.given import Given, moment_ns
from sojourn.interop.held.held import BenchmarkFigures, Figure, Held, Reader, Server, Setting
from sojourn.interop.sources.counters import Counters, is_known
from sojourn.interop.sources.names import canonical, is_router
from sojourn.interop.sources.page import rows_of
from sojourn.interop.sources.pressure import KV_USE, RUNNING, WAITING
from sojourn.interop.sources.registry import recognise
from sojourn.interop.sources.scrapes import STARTED
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.stated import settings_stated, version_stated
from sojourn.interop.sources.translate import Growth, key, names_that_grow, of_family, over_time

SAMPLE = re.compile(
    r"(?P<series>[A-Za-z_:][\w:]*(?<!:)(?:\{(?:[^\"{}]|\"(?:[^\"\\]|\\.)*\")*\})?)[ \t]+"
    r"(?P<value>[-+]?(?:\d[\d.eE+\-]*|\.\d+|[Ii]nf|NaN|Nan))(?:[ \t]+\d+)?[ \t]*$"
)
HEAD = re.compile(r"# (?:HELP|TYPE|EOF|UNIT)\b")
EPOCH = re.compile(r"\D{0,12}(?P<s>1\d{9})(?:\.(?P<part>\d{1,9}))?\D{0,3}$")
DATE = re.compile(
    r"\D*?[A-Z][a-z]{2} (?P<month>[A-Z][a-z]{2}) +(?P<day>\d+) (?P<clock>\d\d:\d\d:\d\d) (?:[AP]M )?UTC (?P<year>\d{4})"
)
ISO = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?")
HTTP_DATE = re.compile(
    r"[Dd]ate: [A-Z][a-z]{2}, (?P<day>\d+) (?P<month>[A-Z][a-z]{2}) (?P<year>\d{4}) (?P<clock>[\d:]{8}) GMT"
)
MEANS = {  # ours → the catalogue's family, factor, unit
    "ttft_ms": ("sojourn_request_ttft_seconds", 1e3, "ms"),
    "itl_ms": ("sojourn_request_itl_seconds", 1e3, "ms"),
    "tpot_ms": ("sojourn_request_tpot_seconds", 1e3, "ms"),
    "e2e_ms": ("sojourn_request_e2e_seconds", 1e3, "ms"),
    "queue_ms": ("sojourn_request_queue_seconds", 1e3, "ms"),
    "prompt_tokens": ("sojourn_request_prompt_length_tokens", 1.0, "tokens"),
    "output_tokens": ("sojourn_request_output_length_tokens", 1.0, "tokens"),
}  # fmt: skip
TOTALS = {
    "requests": ("sojourn_request_finished_total", "requests"),
    "generated_tokens": ("sojourn_token_generated_tokens_total", "tokens"),
    "preemptions": ("sojourn_memory_preemptions_total", "requests"),
}
GAUGES = {"running": (RUNNING, "requests"), "waiting": (WAITING, "requests"), "kv_use": (KV_USE, "share")}
PREFIX = "sojourn_memory_prefix_tokens_total"
SINCE_START, BETWEEN = "server: its own /metrics, since its start", "server: its own /metrics, between two pages"
TOOL = "page of /metrics"
# Servers that are recognised by their names, where no source reads them.
OTHERS: dict[str, Server] = {
    "nv_inference_": "triton",
    "nv_trt_llm_": "triton",
    "dynamo_": "dynamo",
    "litellm_": "litellm",
    "ray_": "ray",
    "ollama_": "ollama",
}
ONE_PAGE = (
    "what happens now: one page has sums since the server's start; take a second one a minute later, and give both"
)
NO_SOURCE = "load and latencies: none of its families is known here"
ONLY_PROCESS = "the server: this page has only families of its process; give the page of the engine's own port"
ROUTER = "an engine: this is a router's page, with its own views of servers; give the page of each engine behind it"
LEFT_OUT = "lines that are no samples were left out: "
CUT = "the last line has no line end, so its number may be cut off: it was left out"


class Page(NamedTuple):
    rows: list[dict[str, Any]]
    ns: int | None
    left_out: int
    is_cut: bool


def recognises(given: Given) -> bool:
    lines = given.text.split("\n", 400)[:400]
    heads = sum(HEAD.match(line.strip()) is not None for line in lines)
    samples = [line for line in lines if SAMPLE.match(line.strip()) is not None]
    return bool(heads and samples) or sum("{" in line or ":" in line for line in samples) >= 3


def read(given: Given) -> list[Held]:
    pages = list(_pages(given.text))
    found = [_held(page, given.name if len(pages) == 1 else f"{given.name} (page {number})")
             for number, page in enumerate(pages, 1)]  # fmt: skip
    if not found:
        raise ValueError("no samples")
    return found


def _pages(text: str) -> Iterator[Page]:
    """A series that comes again begins a new page."""
    lines: list[str] = []
    seen: set[str] = set()
    ns, next_ns, left_out = None, None, 0
    ended = text.endswith("\n")
    all_lines = text.split("\n")
    for number, line in enumerate(each.strip() for each in all_lines):
        if not line or HEAD.match(line):
            continue
        sample = SAMPLE.match(line)
        if sample is None:
            stated = _moment(line)
            next_ns, left_out = (stated, left_out) if stated is not None else (next_ns, left_out + 1)
            continue
        if sample["series"] in seen:
            yield Page(_rows(lines, ns), ns, left_out, False)
            lines, seen, ns, left_out = [], set(), None, 0
        if next_ns is not None:
            ns, next_ns = next_ns, None
        if number == len(all_lines) - 1 and not ended:
            break
        seen.add(sample["series"])
        lines.append(line)
    if lines:
        yield Page(_rows(lines, ns), ns, left_out, not ended)


def _rows(lines: list[str], ns: int | None) -> list[dict[str, Any]]:
    return [row for row in rows_of("\n".join(lines).encode(), ns or 0, 0.0) if row["name"] != "scrape_duration_seconds"]


def _moment(line: str) -> int | None:
    """Of a line between pages: seconds since 1970, an ISO moment, what `date` prints in UTC, or HTTP's Date."""
    if (epoch := EPOCH.match(line)) is not None:
        return int(epoch["s"]) * 10**9 + int((epoch["part"] or "0").ljust(9, "0"))
    if (iso := ISO.search(line)) is not None:
        return moment_ns(iso[0])
    if (date := DATE.match(line) or HTTP_DATE.match(line)) is not None:
        try:
            at = datetime.strptime(f"{date['year']} {date['month']} {date['day']} {date['clock']}", "%Y %b %d %H:%M:%S")
        except ValueError:
            return None
        return int(at.replace(tzinfo=UTC).timestamp()) * 10**9
    return None


def _held(page: Page, name: str) -> Held:
    names = {canonical(row["name"]) for row in page.rows}
    source = recognise(names)
    notes = [f"{page.left_out} {LEFT_OUT}".removesuffix(": ")] if page.left_out else []
    notes += [CUT] if page.is_cut else []
    missing = [ONE_PAGE] if source is not None else [NO_SOURCE if _other(names) else ONLY_PROCESS]
    if is_router(names):
        missing, source = [ROUTER], None
    engines = _engines(page.rows, source)
    if engines > 1:
        notes.append(f"{engines} engines are on this page: figures are of all together")
    return Held(
        kind=TOOL, name=name, server=cast(Server, source.key) if source is not None else _other(names),
        version=version_stated(page.rows), settings=_settings(page.rows), series=page.rows,
        is_wall_clock=page.ns is not None, notes=notes, missing=missing,
        figures=_figures(source, page.rows, None) if source is not None else None,
    )  # fmt: skip


def _other(names: set[str]) -> Server | None:
    return next((server for prefix, server in OTHERS.items() if any(each.startswith(prefix) for each in names)), None)


def _engines(rows: Sequence[Mapping[str, Any]], source: Source | None) -> int:
    label = source.engine_label if source is not None else ""
    return len({dict(row["labels"])[label] for row in rows if label and label in dict(row["labels"])})


def _settings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Setting]:
    """What the page states, and the served model."""
    names = (dict(row["labels"]).get("model_name") for row in rows)
    model = next((name for name in names if name), None)
    return ({"model_name": model} if model else {}) | settings_stated(rows)


def _figures(source: Source, rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]] | None) -> (
    BenchmarkFigures | None
):  # fmt: skip
    """Means and totals since the start, or since an earlier page of the same server."""
    grows = names_that_grow(source)
    first = split(before, grows) if before is not None else (dict.fromkeys(split(rows, grows)[0], 0.0), [])
    figures = figures_between(source, [first, split(rows, grows)], SINCE_START if before is None else BETWEEN)
    figures += _gauges(source, rows)
    return BenchmarkFigures(tool=TOOL, figures=figures) if figures else None


def of_period(name: str, scrapes: Sequence[Sequence[Mapping[str, Any]]]) -> Held:
    """What lies between the first and the last of many pages of one server, over its restarts. Gauges are means.

    Raises ValueError where fewer than two pages are of a server that is known.
    """
    source = recognise({canonical(row["name"]) for rows in scrapes for row in rows})
    if source is None or len(scrapes) < 2:
        raise ValueError(f"{len(scrapes)} pages of no known server" if source is None else "only one page")
    grows = names_that_grow(source)
    figures = figures_between(source, [split(rows, grows) for rows in scrapes], BETWEEN)
    every = [row for rows in scrapes for row in rows]
    figures += _gauges(source, every, mean=True)
    return Held(
        kind=TOOL, name=name, server=cast(Server, source.key), version=version_stated(scrapes[-1]),
        settings=_settings(scrapes[-1]), series=every, figures=BenchmarkFigures(tool=TOOL, figures=figures),
    )  # fmt: skip


def figures_between(source: Source, pages: Sequence[tuple[dict, list]], clock: str) -> list[Figure]:
    """Means and totals from the first page to the last; where counters fall, a server began anew."""
    counters = Counters()
    for page in pages:
        counters.add(*page)
    frame = pd.DataFrame(
        [(name, dict(labels), growth, 0) for (name, labels), growth in counters.gained.items()],
        columns=["name", "labels", "growth", "resets"],
    )
    grown = Growth(source, frame)
    return [
        *_means(grown, clock),
        *_latency(source, grown, clock),
        *_spans(source, grown, clock),
        *_ratios(source, grown, clock),
        *_totals(grown, clock),
    ]


def split(rows: Sequence[Mapping[str, Any]], grows: set[str]) -> tuple[dict, list]:
    """Counters, and the other series."""
    series = {(canonical(row["name"]), tuple(row["labels"])): float(row["value"]) for row in rows}
    counters = {each: value for each, value in series.items() if each[0] in grows and value == value}
    return counters, [each for each in series if each not in counters]


def _means(grown: Growth, clock: str) -> Iterator[Figure]:
    for name, (family, factor, unit) in MEANS.items():
        shown = grown.distribution_of(family)
        if shown is not None:
            yield Figure(name=name, statistic="mean", value=factor * shown.mean, unit=unit, clock=clock, theirs=family)


def _latency(source: Source, grown: Growth, clock: str) -> Iterator[Figure]:
    """Of a server that sums its end-to-end latency up, and has no histogram of it."""
    if source.translates(MEANS["e2e_ms"][0]):
        return
    seconds, requests = grown.total(source.latency.seconds), grown.total(source.latency.requests)
    if seconds is not None and requests:
        yield Figure(name="e2e_ms", statistic="mean", value=1e3 * seconds / requests, unit="ms", clock=clock)


def _spans(source: Source, grown: Growth, clock: str) -> Iterator[Figure]:
    for span in source.spans:
        seconds, requests = grown.total(span.seconds), grown.total(span.requests)
        if span.name != "queue" and seconds is not None and requests:
            yield Figure(name=f"{span.name}_ms", statistic="mean", value=1e3 * seconds / requests, unit="ms",
                         clock=clock, theirs=span.meaning)  # fmt: skip


def _ratios(source: Source, grown: Growth, clock: str) -> Iterator[Figure]:
    for name, (over, by) in source.ratios.items():
        whole, part = grown.total(over), grown.total(by)
        if whole is not None and part:
            is_time = name.endswith("_ms")
            yield Figure(name=name, statistic="mean" if is_time else "rate", value=whole / part,
                         unit="ms" if is_time else "tokens/s", clock=clock)  # fmt: skip


def _totals(grown: Growth, clock: str) -> Iterator[Figure]:
    totals = grown.totals()
    for name, (family, unit) in TOTALS.items():
        value = of_family(totals, family)
        if value is not None:
            yield Figure(name=name, statistic="total", value=value, unit=unit, clock=clock)
    hit, miss = (totals.get(key(PREFIX, (("result", result),))) for result in ("hit", "miss"))
    if hit is not None and miss is not None and hit + miss > 0:
        yield Figure(name="hit_rate", statistic="mean", value=hit / (hit + miss), unit="share", clock=clock)


def _gauges(source: Source, rows: Sequence[Mapping[str, Any]], *, mean: bool = False) -> Iterator[Figure]:
    frame = pd.DataFrame(
        [(row["ns"], float(row["value"]), canonical(row["name"]), dict(row["labels"])) for row in rows
         if is_known(float(row["value"]))],
        columns=["ns", "value", "name", "labels"],
    )  # fmt: skip
    shown = over_time(source, "gauge", frame, "value")
    for name, (family, unit) in GAUGES.items():
        if family in shown and len(shown[family]):
            value = float(shown[family].mean() if mean else shown[family].iloc[-1])
            when = "over all scrapes" if mean else "at the moment of the page"
            yield Figure(name=name, statistic="mean" if mean else "last", value=value, unit=unit,
                         clock=f"server: its own /metrics, {when}")  # fmt: skip


def is_same_server(first: Held, second: Held) -> bool:
    """Whether a page goes on where another one stood: the same process, or no sign of another. Of two that were given
    in the wrong order it does not."""
    if first.server != second.server or first.settings.get("model_name") != second.settings.get("model_name"):
        return False
    started = [[row["value"] for row in each.series if row["name"] == STARTED] for each in (first, second)]
    if all(started) and started[0] != started[1]:
        return False
    source = source_of(first)
    if source is None:
        return all(started)
    grows = names_that_grow(source)
    before, after = split(first.series, grows)[0], split(second.series, grows)[0]
    return all(after.get(series, 0.0) >= value for series, value in before.items())


def is_continued(first: Held, second: Held) -> bool:
    """Whether two pages are for certain of one process: both state the moment at which it began."""
    if not all(each.kind == TOOL and any(row["name"] == STARTED for row in each.series) for each in (first, second)):
        return False
    return is_same_server(first, second)


def between(first: Held, second: Held) -> BenchmarkFigures | None:
    """Means and totals between two pages of one server; None where they are of different processes."""
    source = source_of(second)
    if source is None or not is_same_server(first, second):
        return None
    return _figures(source, second.series, first.series)


def source_of(page: Held) -> Source | None:
    return recognise({canonical(row["name"]) for row in page.series})


PAGE_READER = Reader(
    kind=TOOL,
    shows="of one page means since the start and the settings in labels; of two the means between them",
    recognises=recognises,
    read=read,
)
