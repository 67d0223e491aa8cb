"""vLLM's log, of engine V0 (0.2 to 0.10) and V1. Formats are those of its own code and of lines in public threads.

Its line of figures says rates over the time since the line before, by default 10 s. An idle V1 writes none. The prompt
rate of newer versions leaves out what the prefix cache had, that of older ones does not, so it is `prompt_tokens_total`
only where the cache had nothing. The hit rate is one over the last 1,000 requests, so no counter follows from it.
"""

import re
from collections.abc import Callable
from typing import Any

from sojourn.interop.held.given import Given, Line
from sojourn.interop.held.held import Event, Held
from sojourn.interop.held.literals import found_in
from sojourn.interop.held.logs.clock import STAMP, clock_of, stated_elsewhere
from sojourn.interop.held.logs.events import events_of, while_serving
from sojourn.interop.held.logs.series import LATE, late_gaps, rows_of, usual_interval_s
from sojourn.interop.held.logs.vllm_lines import (
    HIT_RATE,
    PREEMPTIONS,
    RATES,
    Figures,
    figures_in,
    hangs_of,
    is_v1,
    means_of,
    said_by,
)
from sojourn.interop.held.logs.vllm_settings import START, settings_of

ACCESS = "INFO:     "  # what Uvicorn writes of each request, without a stamp
USUAL_S = {True: 10.0, False: 5.0}  # V1, V0
NO_LATENCY = "latencies (TTFT, TPOT, queue time): vLLM's log has none; give two pages of its /metrics, minutes apart"
NO_STAMPS = "moments: its lines have no stamps, so nothing can be said over time"
FRONTS = "series: several fronts of one engine write into this log; give the log of one"
ENGINE = re.compile(r"\(EngineCore(?:_DP\d+)? pid=(\d+)\)")
DYNAMO = re.compile(r"dynamo[._](?:llm|runtime|vllm|frontend)|ai-dynamo")
TOGETHER = "the lines are of several engines together: KV use is their mean, and imbalance cannot be seen"


def recognises(given: Given) -> bool:
    text = given.plain
    return RATES in text or found_in(START, text) or "vllm/v1/" in text or "vllm/engine/" in text


def read(given: Given) -> list[Held]:
    lines, clock = given.lines, clock_of(given.text)
    found = list(figures_in(lines, clock))
    stated, moment = settings_of(lines, given.plain), _moments(lines, given.text)
    starts = stated.starts[1:]
    stamped = [each for each in found if each.ns is not None]
    series, events, notes = _over_time(stamped, lines, {line.number for line in starts}, moment)
    last = [each for each in found if not starts or each.line.number > starts[-1].number]
    notes = [*([clock.note] if clock.note and stamped else []), *notes, *_left_out(lines, found)]
    notes += [f"settings changed at a restart: {change}" for change in stated.changes]
    if starts and len(last) < len(found):
        notes.append(f"settings and means are of the last of {len(starts) + 1} starts, from line {starts[-1].number}")
    served = [each.line.number for each in found if float(each.match["running"]) > 0]
    events += while_serving(events_of(lines, moment), served, [line.number for line in stated.starts])
    events += [Event(kind="restart", sentence="the server was started again", line=line.number, ns=moment(line))
               for line in starts]  # fmt: skip
    return [Held(
        kind=f"{_carrier(given.text)}vLLM log", name=given.name, server="vllm", version=stated.version,
        settings=stated.settings, figures=means_of(last), series=series, notes=notes,
        engine_pid=_engine_pid(lines, starts[-1].number if starts else 0),
        is_wall_clock=clock.is_wall_clock or stated_elsewhere([each.line.ns for each in stamped]),
        missing=_missing(found, stamped, series, any(event.kind == "preemption" for event in events)),
        events=sorted(events, key=lambda event: event.line),
    )]  # fmt: skip


def _engine_pid(lines: list[Line], begin: int) -> int | None:
    """Of the last start, at line `begin`; None where no engine, or more than one, signs its lines."""
    pids = {int(found[1]) for line in lines if line.number >= begin and (found := ENGINE.search(line.text)) is not None}
    return pids.pop() if len(pids) == 1 else None


def _left_out(lines: list[Line], found: list[Figures]) -> list[str]:
    """What the lines of figures do not say."""
    notes = []
    if misread := sum(line.text.count(RATES) for line in lines) - len(found):
        notes.append(f"{misread} lines of figures are cut off or mixed with others, and were left out")
    if any(each.match["several"] for each in found):
        notes.append(TOGETHER)
    return notes


def _over_time(
    stamped: list[Figures], lines: list[Line], starts: set[int], moment: Callable[[Line], int | None]
) -> tuple[list[dict[str, Any]], list[Event], list[str]]:
    """The series, times without a token, and what to know of both."""
    said = said_by(stamped, lines, starts)
    if not said:
        return [], [], []
    interval_s = usual_interval_s(said, USUAL_S[is_v1(stamped)])
    notes = [f"figures are averages over {interval_s:.0f} s: what is shorter cannot be seen"]
    if gaps := late_gaps(said, interval_s):
        notes.append(
            f"{len(gaps)} times under load no line came for more than {LATE * interval_s:.0f} s (first after line "
            f"{gaps[0][0].line}): rates are taken to go on as the next line says"
        )
    return rows_of(said, interval_s, not is_v1(stamped)), hangs_of(said, lines, moment), notes


def _missing(
    found: list[Figures], stamped: list[Figures], series: list[dict[str, Any]], names_preemptions: bool
) -> list[str]:
    missing = [NO_LATENCY]
    if not found:
        return [*missing, "load: no line of figures; vLLM writes one every 10 s without --disable-log-stats"]
    if not stamped:
        missing.append(NO_STAMPS)
    elif not series:
        missing.append(FRONTS)
    if is_v1(found) and all(each.share(HIT_RATE) is None for each in found):
        missing.append("prefix cache hit rate: no line has one (the cache is off, or was never asked)")
    if not names_preemptions and not any(PREEMPTIONS.search(each.match["rest"] or "") for each in found):
        missing.append("preemptions: no line names one; only newer versions count them in the log")
    return missing


def _moments(lines: list[Line], text: str) -> Callable[[Line], int | None]:
    """Line → its moment, on the same clock as the series."""
    outside = stated_elsewhere([line.ns for line in lines if RATES in line.text])
    clock = clock_of(text)
    stamped = [] if outside else [line for line in lines if ACCESS not in line.text]
    own = {line.number: clock.ns(STAMP.search(line.text[:120])) for line in stamped}

    def moment(line: Line) -> int | None:
        return line.ns if outside else own.get(line.number)

    return moment


def _carrier(text: str) -> str:
    """Whose log carries vLLM's lines."""
    if "ServeReplica:" in text or "ray.serve" in text or "serve.llm" in text:
        return "Ray Serve's "
    return "Dynamo's " if "dynamo" in text and DYNAMO.search(text) else ""
