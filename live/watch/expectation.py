"""What the requests of a window lost: above their objectives where there are some, else above their own work.

Histograms and sums over the window are all there is: no single request is known. An objective is missed only by those
requests that lie above it for certain, whatever bucket holds the bound.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pandas as pd

from sojourn.diagnosis.evidence import Accounts, Means
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.expectation import NOTICEABLE_MS, STRETCH, is_own_work
from sojourn.diagnosis.server_means import mean_excess, quantity_means, shows_ledger
from sojourn.diagnosis.statements.accounts import PREDICTION
from sojourn.diagnosis.statements.means import line_wait_s
from sojourn.diagnosis.symptoms import TOLERATED_MISSES
from sojourn.interop.sources.pressure import WAITING
from sojourn.interop.sources.translate import Growth, key, of_family
from sojourn.interop.sources.view import FINISHED, ServerView
from sojourn.live.watch.document import Met
from sojourn.live.watch.load_only import is_load_only
from sojourn.metrics.request.objectives import short

HISTOGRAMS = {
    "ttft_ms": "sojourn_request_ttft_seconds",
    "tpot_ms": "sojourn_request_tpot_seconds",
    "e2e_ms": "sojourn_request_e2e_seconds",
}
QUEUE_SECONDS = "sojourn_request_queue_seconds"
OWN_COUNT = "sojourn_request_objective_total"
REJECTED = ("sojourn_request_rejected_total", "sojourn_request_limited_total")
FEWEST = 5  # requests that ended in the window: a mean of fewer says little
STALLED_WRITES = 0.2  # of the latency, and more than the noticeable time to first token
STREAM = "request.stream"
QUEUE_FULL = "HTTP 429: the queue is full"  # where time is lost, too, what makes the others wait is its cause
LOST_SHARE, FEWEST_LOST = 0.05, 3  # of the requests: fewer refusals and errors are chance
WASTED = ("miss_disabled", "miss_evicted")  # prompt tokens that a larger cache, or one that is on, would have had
WASTE = 0.3  # of the prompt tokens
WORK = "what their own work takes"
# Requests that wait now are in no histogram yet. They count where their wait is far above what ended requests had.
IN_LINE = "what ended requests had"
EASED = 0.5  # of each limit, while time is lost: what lies near a limit would else be lost time now and then
ALIKE = 0.05  # of the first tokens, by how many the ends may differ; four times as many while time is lost
SAME_REQUESTS = 0.1  # of the window, at most, from the first token of a request to its end
LONG_WAIT_MS = 2000.0  # without an objective for the first token, so long a wait is lost time


def met(grown: Growth, view: ServerView, objectives: Mapping[str, float]) -> list[Met]:
    """The share of the window's requests that met each objective, and all of those that the server itself counts."""
    found = []
    for name, bound_ms in objectives.items():
        below = grown.below(HISTOGRAMS[name])
        if below:
            low, high = shares_below(below, bound_ms / 1e3)
            around = bounds_around(below, bound_ms / 1e3)
            between = around and (1e3 * around[0], None if math.isinf(around[1]) else 1e3 * around[1])
            found.append(
                Met(objective=f"{short(name)} ≤ {bound_ms:g} ms", klass="", at_least=low, at_most=high,
                    requests=int(max(below.values())), source=HISTOGRAMS[name], between_ms=between)
            )  # fmt: skip
    return found or _own_count(view)


def bounds_around(below: Mapping[float, float], bound_s: float) -> tuple[float, float] | None:
    """The bounds of a histogram next below and next above; None of one that it has, or where it makes no difference."""
    at_least, at_most = shares_below(below, bound_s)
    if round(at_least, 3) == round(at_most, 3):
        return None
    low = max((edge for edge in below if edge < bound_s), default=0.0)
    return float(low), float(min(edge for edge in below if edge > bound_s))


def shares_below(below: Mapping[float, float], bound_s: float) -> tuple[float, float]:
    """The share of observations at or below a bound: at least, and at most."""
    whole = max(below.values())
    at_least = max((count for edge, count in below.items() if edge <= bound_s * (1 + 1e-9)), default=0.0)
    at_most = next((count for edge, count in below.items() if edge >= bound_s * (1 - 1e-9)), whole)
    return at_least / whole, at_most / whole


def _own_count(view: ServerView) -> list[Met]:
    counts: dict[str, dict[str, float]] = {}
    for name, value in view.totals.items():
        if name.startswith(f"{OWN_COUNT}{{") and 'objective="all_objectives"' in name:
            labels = dict(part.split("=", 1) for part in name[len(OWN_COUNT) + 1 : -1].split(","))
            counts.setdefault(labels["klass"].strip('"'), {})[labels["outcome"].strip('"')] = value
    return [
        Met(objective="all objectives", klass=klass, at_least=each.get("met", 0.0) / sum(each.values()),
            at_most=each.get("met", 0.0) / sum(each.values()), requests=int(sum(each.values())), source=OWN_COUNT)
        for klass, each in sorted(counts.items())
        if sum(each.values()) > 0
    ]  # fmt: skip


def lost_time(
    facts: Means | Accounts, grown: Growth, objectives: Mapping[str, float], shown: Iterable[Met], ease: float = 1.0
) -> list[Excess]:
    """What the requests of the window lost, most first; [] of a window in which nothing did. `ease`: part of each
    limit from which on time counts as lost."""
    tolerated = ease * TOLERATED_MISSES
    if (facts.server.finished or 0) < FEWEST:
        found = []
    elif objectives:
        above = (_above(facts, grown, name, bound, tolerated) for name, bound in objectives.items())
        found = [late for late in above if late is not None]
    else:
        missed = any(1 - each.at_most > tolerated for each in shown)
        found = _beyond_own_work(facts, 0.0 if missed else STRETCH - 1, ease)
    if not any(each.objective == "ttft_ms" for each in found):
        found += _in_line(facts, objectives, ease)
    losses = [each for each in losses_of(facts.server) if not (found and each.error == QUEUE_FULL)]
    return sorted([*found, *losses], key=lambda excess: -excess.missed)


def _above(
    facts: Means | Accounts, grown: Growth, name: str, bound_ms: float, tolerated: float
) -> Excess | None:  # fmt: skip
    """The requests that miss an objective for certain, where they are more than is tolerated."""
    below = grown.below(HISTOGRAMS[name])
    if not below:
        return None
    whole = max(below.values())
    missed = (1 - shares_below(below, bound_ms / 1e3)[1]) * whole
    if whole < FEWEST or missed <= tolerated * whole:
        return None
    late = _excess(name, bound_ms, missed, whole, max(bound_ms, _mean_above(below, bound_ms / 1e3)), "the objective")
    return mean_excess(facts, late)


def _mean_above(below: Mapping[float, float], bound_s: float) -> float:
    """The mean of what lies above a bound, in ms: each bucket counts with its middle, the last one with its edge."""
    edges, total, number, before = sorted(below), 0.0, 0.0, 0.0
    for place, edge in enumerate(edges):
        inside, lower = below[edge] - before, edges[place - 1] if place else 0.0
        before = below[edge]
        if lower >= bound_s * (1 - 1e-9):
            total += inside * (lower if math.isinf(edge) else (lower + edge) / 2)
            number += inside
    return 1e3 * total / number if number else 0.0


def _beyond_own_work(facts: Means | Accounts, stretch: float, ease: float) -> list[Excess]:
    """`stretch`: of the own work, what makes the rest of the time lost."""
    found = []
    for name, noticeable_ms in NOTICEABLE_MS.items():
        mean_ms = _mean_ms(facts.server, name)
        if mean_ms is None:
            continue
        means = quantity_means(facts, name) if shows_ledger(facts) else {}
        others = {account: ms for account, ms in means.items() if not is_own_work(account)}
        if means:
            scale = mean_ms / sum(means.values())  # a time per token: the means are of the whole decode
            others |= _slowed(facts, means)
            others |= _wasted(facts, means) if name == "ttft_ms" else {}
            above = {account: ms * scale for account, ms in others.items()}
        else:
            above = _foreign(facts.server, name, mean_ms, ease)
        lost_ms = sum(above.values())
        own_ms = mean_ms - lost_ms
        if lost_ms >= ease * noticeable_ms and lost_ms >= ease * stretch * own_ms:
            requests = facts.server.finished or 0.0
            found.append(_excess(name, max(own_ms, 1e-3), requests, requests, mean_ms, WORK, above if means else {}))
    return found + _stalled_writes(facts)


def _in_line(facts: Means | Accounts, objectives: Mapping[str, float], ease: float) -> list[Excess]:
    """The requests that wait, where their wait is long. Those that came within a step wait for no slot.

    Clients that give up in the queue get no first token, so that no histogram ever shows their wait.
    """
    waiting = facts.server.gauges.get(WAITING)
    if waiting is None or waiting.mean < ease * FEWEST:
        return []
    ended, ttft = facts.server.finished or 0.0, facts.server.latencies.get(HISTOGRAMS["ttft_ms"])
    if is_load_only(facts.server):
        return []  # how fast the line moves is unknown
    wait_ms = 1e3 * (line_wait_s(facts.server) or 0.0)
    bound_ms = objectives.get("ttft_ms", LONG_WAIT_MS)
    mean_ms = 1e3 * ttft.mean if ttft is not None else 0.0
    own_ms = mean_ms - sum(_foreign(facts.server, "ttft_ms", mean_ms, ease).values())
    if wait_ms <= ease * max(bound_ms, (STRETCH - 1) * own_ms):
        return []
    late = _excess("ttft_ms", bound_ms, waiting.mean, waiting.mean + ended, wait_ms, IN_LINE)
    return [replace(mean_excess(facts, late), baseline=IN_LINE)]


def _slowed(facts: Means | Accounts, means: Mapping[str, float]) -> dict[str, float]:
    """The part of the own steps that is above what their composition explains, where that is clearly so."""
    shown = facts.server.latencies.get(PREDICTION)
    if shown is None or shown.mean < STRETCH:
        return {}
    return {
        account: (1 - 1 / shown.mean) * means.get(account, 0.0) for account in ("compute.prefill", "compute.decode")
    }


def _wasted(facts: Means | Accounts, means: Mapping[str, float]) -> dict[str, float]:
    """The part of the own prefill that a cache would have spared."""
    outcomes = facts.prefix.outcomes if isinstance(facts, Accounts) and facts.prefix is not None else {}
    share = sum(outcomes.get(name, 0.0) for name in WASTED)
    return {"compute.prefill": share * means.get("compute.prefill", 0.0)} if share >= WASTE else {}


def _foreign(view: ServerView, name: str, mean_ms: float, ease: float) -> dict[str, float]:
    """Of a server that measures stretches only: its queue is no work of the request, nor is what lies before it."""
    queue = view.queue
    if queue is None or name != "ttft_ms":
        return {}
    if queue.ttft_share is not None:
        queued_ms = min(1.0, queue.ttft_share) * mean_ms
    else:
        queued_ms = min(queue.ttft_ms or queue.mean_ms, mean_ms)
    return {"request.queue": queued_ms} | _before_queue(view, mean_ms, queued_ms, ease)


def _before_queue(view: ServerView, ttft_ms: float, queued_ms: float, ease: float) -> dict[str, float]:
    """The time to first token that is in no phase: between the front and the core. It is known where first tokens and
    ends in the window are of the same requests, but for few."""
    prefill, e2e_ms = view.span("compute.prefill"), _mean_ms(view, "e2e_ms")
    if prefill is None or prefill.ttft_ms is None or e2e_ms is None:
        return {}
    first, ended = view.latencies[HISTOGRAMS["ttft_ms"]].count, prefill.requests
    if e2e_ms - ttft_ms > SAME_REQUESTS * 1e3 * view.seconds or abs(first - ended) > ALIKE / ease**2 * first:
        return {}
    return {"request.admission": max(0.0, ttft_ms - queued_ms - prefill.ttft_ms)}


def _stalled_writes(facts: Means | Accounts) -> list[Excess]:
    span, whole_ms = facts.server.span(STREAM), facts.server.server_ms
    if span is None or len(span.accounts) > 1 or not whole_ms:
        return []
    if span.mean_ms < STALLED_WRITES * whole_ms or span.mean_ms < NOTICEABLE_MS["ttft_ms"]:
        return []
    number = facts.server.finished or 0.0
    return [_excess("e2e_ms", whole_ms - span.mean_ms, number, number, whole_ms, WORK, {STREAM: span.mean_ms})]


def losses_of(view: ServerView) -> list[Excess]:
    """Requests that the server refused or failed, one excess for each kind."""
    ended = of_family(view.totals, FINISHED) or 0.0
    failed = view.totals.get(key(FINISHED, (("outcome", "error"),)), 0.0)
    refused, limited = (of_family(view.totals, name) or 0.0 for name in REJECTED)
    sent = ended + refused + limited
    kinds = (
        (failed, "the server failed them"),
        (refused, QUEUE_FULL),
        (limited, "HTTP 429: the tenant has reached its limit"),
    )
    return [
        _excess(SERVED, 0.0, number, sent, 0.0, "the served requests", {}, error)
        for number, error in kinds
        if number >= FEWEST_LOST and number >= LOST_SHARE * sent
    ]


def _mean_ms(view: ServerView, name: str) -> float | None:
    shown = view.latencies.get(HISTOGRAMS[name])
    return 1e3 * shown.mean if shown is not None else None


def _excess(
    objective: str, bound_ms: float, missed: float, sent: float, mean_ms: float, baseline: str,
    accounts: Mapping[str, float] | None = None, error: str = "",
) -> Excess:  # fmt: skip
    return Excess(
        objective=objective, klass="", bound_ms=bound_ms, missed=round(missed), sent=max(1, round(sent)),
        mean_ms=mean_ms, baseline=baseline, accounts=dict(accounts or {}), missing=pd.Index([]), error=error,
    )  # fmt: skip
