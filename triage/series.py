"""Rows of scrapes, of a log or of pages, judged as the watch judges a live server; and what its line alone shows."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

from sojourn.diagnosis.causes.batch_cap import larger_batch
from sojourn.interop.held.held import Held
from sojourn.interop.held.logs.pages import TOOL, is_same_server
from sojourn.interop.sources.pressure import RUNNING
from sojourn.interop.sources.scrapes import UP
from sojourn.live.watch.document import WatchedServer
from sojourn.live.watch.observer import Observer
from sojourn.triage.document import Likely

SHORTEST_S = 2.0  # of a window
MOST_MOMENTS, IDLE_MOMENTS = 240, 3  # that are judged; of a log of vLLM 40 minutes
FEWEST_LINES, MOSTLY = 3, 0.9  # samples with a line in front of the batch, and the share of them that look alike
CAP, STATED_CAP, KV_POOL = 0.75, 0.9, 0.8  # confidence


def groups(held: Sequence[Held]) -> Iterator[list[Held]]:
    """What is judged together: each log alone, the dated pages of one server as one series."""
    pages = sorted(
        (each for each in held if is_page(each) and each.is_wall_clock), key=lambda each: each.series[0]["ns"]
    )
    yield from ([each] for each in held if each.series and not is_page(each))
    chain: list[Held] = []
    for page in pages:
        if chain and not is_same_server(chain[-1], page):
            yield chain
            chain = []
        chain.append(page)
    if chain:
        yield chain


def undated(held: Sequence[Held]) -> Iterator[tuple[Held, Held]]:
    """Pages without a moment that follow each other, as they were given: means lie between them, and no rate."""
    pages = [each for each in held if is_page(each) and not each.is_wall_clock]
    yield from ((first, second) for first, second in pairwise(pages) if is_same_server(first, second))


def is_page(held: Held) -> bool:
    return held.kind == TOOL and bool(held.series)


def judged(held: Sequence[Held], bounds: Mapping[str, float]) -> WatchedServer | None:
    """The verdict of the whole span of the rows; None where they hold fewer than two moments."""
    rows = recent(held)
    moments = sorted({_moment(row) for row in rows})
    if len(moments) < 2:
        return None
    window_s = max(SHORTEST_S, (moments[-1] - moments[0]) / 1e9)
    observer = Observer("", ", ".join(dict.fromkeys(each.name for each in held)), bounds, window_s, is_now=False)
    for ns, group in groupby(rows, key=_moment):
        seen = list(group)
        if any(row["name"] != UP for row in seen):
            observer.add(ns, [_with_pairs(row) for row in seen])
        else:
            observer.add_failure(ns, "a scrape failed")
    return observer.watched()


def recent(held: Sequence[Held]) -> list[dict[str, Any]]:
    """The rows of the last moments with load, in order of time: the mean of a week says nothing of its worst hour, and
    judging a moment takes a hundredth of a second. An idle end is left out, but for a few moments."""
    rows = sorted((row for each in held for row in each.series), key=_moment)
    moments = sorted({_moment(row) for row in rows})
    if len(moments) <= MOST_MOMENTS:
        return rows
    busy = {_moment(row) for row in rows if "running" in row["name"] and row["value"] > 0}
    last = max(busy, default=moments[-1])
    end = min(len(moments), bisect_right(moments, last) + IDLE_MOMENTS)
    begin_ns, end_ns = moments[max(0, end - MOST_MOMENTS)], moments[end - 1]
    return [row for row in rows if begin_ns <= _moment(row) <= end_ns]


def left_out(held: Sequence[Held]) -> int:
    """How many moments are not judged."""
    return len({_moment(row) for each in held for row in each.series}) - len({_moment(row) for row in recent(held)})


def line_facts(server: WatchedServer) -> list[str]:
    """What the gauges say of a line that the watch names no cause for."""
    waiting = server.view.waiting if server.view is not None else None
    if waiting is None or waiting.samples < FEWEST_LINES or server.state != "cannot tell":
        return []
    return [f"Requests wait in {waiting.samples} of {server.scrapes} samples, up to {waiting.largest:,.0f} at once"]


def cause_of_line(server: WatchedServer, settings: Mapping[str, Any], level: Any) -> Likely | None:
    """What holds a line, by gauges alone: a batch that never grows beyond a size, or KV that is full."""
    view = server.view
    waiting = view.waiting if view is not None else None
    if view is None or waiting is None or waiting.samples < FEWEST_LINES or server.findings:
        return None
    running = view.gauges[RUNNING].largest if RUNNING in view.gauges else None
    if (waiting.with_kv_full or 0.0) >= MOSTLY:
        return Likely(
            key="kv_pool", cause="the KV cache is full: requests wait for room in it", confidence=KV_POOL, level=level,
            evidence=f"in {waiting.with_kv_full:.0%} of {waiting.samples} samples with a line KV use is at its top",
            rivals=["a limit on the batch that is reached at the same time"], source=server.name,
        )  # fmt: skip
    if running and (waiting.with_kv_free or 0.0) >= MOSTLY and (waiting.at_largest_batch or 0.0) >= MOSTLY:
        is_stated = settings.get("max_num_seqs") == running or settings.get("max_running_requests") == running
        stated = ", the limit that its flags state" if is_stated else ""
        return Likely(
            key="batch_cap", cause=f"a limit on the batch: {running:,.0f} run and others wait beside free KV",
            confidence=STATED_CAP if is_stated else CAP, level=level,
            evidence=f"in {waiting.at_largest_batch:.0%} of {waiting.samples} samples with a line so many run{stated}",
            rivals=["a device that is full at that batch: then a larger limit gains nothing"], source=server.name,
            change=larger_batch(view.settings["batch cap"], running) if "batch cap" in view.settings else "",
        )  # fmt: skip
    return None


def _moment(row: Mapping[str, Any]) -> int:
    return int(row["ns"])


def _with_pairs(row: Mapping[str, Any]) -> dict[str, Any]:
    """Labels as pairs, as a page gives them."""
    labels = row["labels"]
    return {**row, "labels": list(labels.items()) if isinstance(labels, dict) else [tuple(pair) for pair in labels]}
