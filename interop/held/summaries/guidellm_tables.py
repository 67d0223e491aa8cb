"""The tables that GuideLLM prints: two lines of head before 0.4, three since.

A cell of the head that stands over several columns is followed by empty ones. Tables of one run have a row for each
benchmark, in the same order.
"""

import re
from collections.abc import Iterator
from typing import Any

from sojourn.interop.held.given import Given
from sojourn.interop.held.held import BenchmarkFigures, Held, Reader
from sojourn.interop.held.summaries.figures import figures_of, load_of, prove
from sojourn.interop.held.summaries.guidellm import CLOCKS, NOT_SHOWN, TOOL
from sojourn.interop.imported.result import number
from sojourn.metrics.errors import InputError

RULE = re.compile(r"\|?[=|]{20,}\|?")
UNDER_HEAD = re.compile(r"\|?-[-|]{18,}\|?")
TITLES = ("Benchmarks Info:", "Benchmarks Stats:", "Run Summary Info", "Request Latency Statistics",
          "Server Throughput Statistics", "Request Token Statistics")  # fmt: skip
STATISTICS = {"mean": "mean", "median": "median", "mdn": "median", "p95": "p95", "p99": "p99"}
# Group and name of the head → ours, factor. Rates are read as means.
COLUMNS = {
    "request latency sec": ("e2e_ms", 1e3), "req latency (sec)": ("e2e_ms", 1e3), "ttft ms": ("ttft_ms", 1.0),
    "ttft (ms)": ("ttft_ms", 1.0), "itl ms": ("tpot_ms", 1.0), "itl (ms)": ("tpot_ms", 1.0),
    "tpot ms": ("e2e_per_token_ms", 1.0), "requests concurrency": ("in_flight", 1.0),
    "requests per sec": ("requests_per_s", 1.0), "input tokens per sec": ("input_tokens_per_s", 1.0),
    "output tokens per sec": ("output_tokens_per_s", 1.0), "total tokens per sec": ("total_tokens_per_s", 1.0),
    "out tok/sec": ("output_tokens_per_s", 1.0), "tot tok/sec": ("total_tokens_per_s", 1.0),
    "input tok per req": ("input_tokens", 1.0), "output tok per req": ("output_tokens", 1.0),
}  # fmt: skip
RATES = {"requests_per_s", "input_tokens_per_s", "output_tokens_per_s", "total_tokens_per_s"}
WHOLE = {
    "request stats per second": ("requests_per_s", "rate"), "request stats concurrency": ("in_flight", "mean"),
    "metadata duration (s)": ("duration_s", "total"), "timings dur sec": ("duration_s", "total"),
    "requests made comp": ("succeeded", "total"), "requests made inc": ("incomplete", "total"),
    "requests made err": ("failed", "total"), "prompt tok/req comp": ("input_tokens", "mean"),
    "output tok/req comp": ("output_tokens", "mean"), "prompt tok total comp": ("input_tokens", "total"),
    "output tok total comp": ("output_tokens", "total"), "input tokens comp tot": ("input_tokens", "total"),
    "output tokens comp tot": ("output_tokens", "total"),
}  # fmt: skip
Row = tuple[str, dict[tuple[str, str], tuple[Any, float, str]]]


def recognises(given: Given) -> bool:
    text = given.plain
    return any(title in text for title in TITLES) and any(RULE.fullmatch(line.text.strip()) for line in given.lines)


def read(given: Given) -> list[Held]:
    rows: list[Row] = []
    cut = 0
    for table, whole in _tables(given):
        cut += not whole
        for place, (label, told) in enumerate(table):
            if place == len(rows):
                rows.append((label, {}))
            rows[place][1].update(told)
    if not any(told for _, told in rows):
        raise InputError("has tables of GuideLLM without a whole row; give the report that it wrote (benchmarks.json)")
    notes = [f"{cut} tables are cut off or wrapped; rows that lack cells were left out"] if cut else []
    found = []
    for label, told in rows:
        kind, _, level = label.partition("@")
        of_level = {"constant": "request_rate", "poisson": "request_rate", "concurrent": "max_concurrency"}.get(kind)
        load = load_of(process=kind, **({of_level: number(level)} if of_level else {}))
        figures = BenchmarkFigures(tool=TOOL, label=label, load=load, figures=figures_of(CLOCKS, told))
        if figures.figures:
            found.append(Held(kind="tables of GuideLLM", name=given.name, figures=figures,
                              notes=[*notes, *prove(figures)], missing=NOT_SHOWN))  # fmt: skip
    return found


def _tables(given: Given) -> Iterator[tuple[list[Row], bool]]:
    """The rows of each table, and whether all of it could be read."""
    head: list[list[str]] = []
    rows: list[list[str]] = []
    inside = under = False
    for text in [*(line.text.strip() for line in given.lines), "=" * 20]:
        if RULE.fullmatch(text):
            if inside and under:
                yield _rows(head, rows)
            head, rows, under = [], [], False
            inside = True
        elif inside and UNDER_HEAD.fullmatch(text):
            under = True
        elif inside and "|" in text:
            (rows if under else head).append(_cells(text))


def _rows(head: list[list[str]], rows: list[list[str]]) -> tuple[list[Row], bool]:
    names = _names(head)
    whole = [row for row in rows if len(row) == len(names)]
    return [(row[0], _told(names, row)) for row in whole if row[0]], len(whole) == len(rows) and bool(names)


def _cells(text: str) -> list[str]:
    return [cell.strip() for cell in text.removeprefix("|").removesuffix("|").split("|")]


def _names(head: list[list[str]]) -> list[str]:
    """One a column: its group, its name and its unit or statistic."""
    width = max(map(len, head), default=0)
    if any(len(line) > width or len(line) < width - 2 for line in head):
        return []
    filled = []
    for place, line in enumerate(head):
        last, cells = "", []
        for cell in [*line, *[""] * (width - len(line))]:
            last = cell or (last if place < len(head) - 1 else "")
            cells.append(last)
        filled.append(cells)
    return [" ".join(filter(None, parts)).lower() for parts in zip(*filled, strict=True)]


def _told(names: list[str], row: list[str]) -> dict[tuple[str, str], tuple[Any, float, str]]:
    told: dict[tuple[str, str], tuple[Any, float, str]] = {}
    for name, cell in zip(names, row, strict=True):
        column, _, word = name.rpartition(" ")
        if name in WHOLE:
            told[WHOLE[name]] = cell, 1.0, name
        elif column in COLUMNS and word in STATISTICS:
            ours, factor = COLUMNS[column]
            if ours not in RATES:
                told[ours, STATISTICS[word]] = cell, factor, name
            elif word == "mean":
                told[ours, "rate"] = cell, factor, name
    return told


TABLES = Reader(
    kind="the tables that GuideLLM prints", shows="means, medians and p95 or p99 of each benchmark of a sweep",
    recognises=recognises, read=read, shares_text=True,
)  # fmt: skip
