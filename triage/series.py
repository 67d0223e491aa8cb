"""Series of logs and pages: which are of one server, how they are judged, and what a line of requests alone shows."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from sojourn.diagnosis.causes.batch_cap import larger_batch
from sojourn.interop.held.held import Held
from sojourn.interop.held.logs.pages import TOOL, is_same_server
from sojourn.interop.sources.pressure import RUNNING
from sojourn.live.watch.document import WatchedServer
from sojourn.live.watch.periods import Periods, periods
from sojourn.triage.document import Likely

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


def judged(held: Sequence[Held], bounds: Mapping[str, float]) -> Periods | None:
    """The worst period, as of any series; None where the rows hold fewer than two moments."""
    names = ", ".join(dict.fromkeys(each.name for each in held))
    return periods((row for each in held for row in each.series), names, bounds)


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
