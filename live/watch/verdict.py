"""The verdict on a window: the causes that a diagnosis knows, asked about what its metrics show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import pandas as pd

from sojourn.diagnosis.adjudicate import adjudicate
from sojourn.diagnosis.evidence import Means
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.expectation import STRETCH
from sojourn.diagnosis.findings import finding_of_symptom, findings
from sojourn.diagnosis.server_means import with_means
from sojourn.diagnosis.state import BALANCED, CLEAR_MARGIN
from sojourn.diagnosis.statements.accounts import ROOM_SOURCES
from sojourn.diagnosis.suspects import suspects_of
from sojourn.diagnosis.symptoms import BY_KEY, TOLERATED_MISSES, check
from sojourn.diagnosis.verdict import Finding, Fix
from sojourn.interop.sources.pressure import GENERATED, WAITING
from sojourn.interop.sources.registry import SOURCES
from sojourn.interop.sources.sglang import SGLANG
from sojourn.interop.sources.sojourn import SOJOURN
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import Growth, of_family
from sojourn.interop.sources.view import FINISHED, ServerView
from sojourn.interop.sources.vllm import VLLM
from sojourn.live.watch.document import Met, State
from sojourn.live.watch.expectation import HISTOGRAMS, IN_LINE, WORK, lost_time, met
from sojourn.live.watch.load_only import is_load_only, state_of_load
from sojourn.metrics.request.goodput import judged
from sojourn.metrics.request.objectives import short
from sojourn.metrics.run.directory import RunDirectory

KV_FILLS = BY_KEY["vram_fills_quickly"]
BATCH_OR_DEVICE = ("batch_cap", "overload")  # look alike until somebody saw what a larger batch gives
NO_GAIN = "means cannot show how much it gains"
MORE_RECORDS = {
    SOJOURN.key: "which requests are hit, and the steps behind it: start the server with `--run-dir DIR`, and watch "
    "with `--server-run DIR` on its host",
    VLLM.key: "why each request waited, whose prompts slowed whose tokens, and which prompts repeat: start vLLM with "
    "`sojourn-probe vllm --out DIR`, and watch with `--server-run DIR`",
    SGLANG.key: "why each request waited: SGLang's metrics do not say, nor does anything that attaches to it from "
    "outside; replay a load of your own with `sojourn load`",
}
NO_OBJECTIVE = (
    "no objective is known, so time counts as lost only where requests take twice what their own work takes; name "
    "objectives with `--slo 'ttft:500 tpot:50'`"
)


@dataclass(frozen=True, slots=True)
class Verdict:
    state: State
    headline: str
    met: list[Met]
    findings: list[Finding]
    unknown: list[str]
    stand_in: dict[str, float]  # without objectives: what would be one for the time that is lost, in ms


def verdict(
    view: ServerView, grown: Growth, objectives: Mapping[str, float], batch_gain: float | None = None
) -> Verdict:
    """What the window shows. Abstains where time is lost and no cause that its metrics can name explains it."""
    facts = with_means(_facts(view, objectives, batch_gain))
    shown = met(grown, view, objectives)
    lost = lost_time(facts, grown, objectives, shown)
    judgement = adjudicate(facts, lost, suspects_of(facts, lost), None)
    found = [_plain(each, lost) for each in findings(facts, judgement)]
    if not any(each.key == "kv_pool" for each in found) and check(facts, KV_FILLS).status == "present":
        pool = finding_of_symptom(facts, KV_FILLS)
        found += [] if pool is None else [_plain(pool, lost)]
    state, headline = _state(view, lost, found, shown)
    unshown = _unshown(view, grown, objectives)
    missing = [*unshown, *_missing(view)]
    if state == "healthy" and missing:
        state, headline = "cannot tell", f"No metric of {view.title}'s page shows {', '.join(missing)}"
    unknown = [f"{each} is unknown: no metric of the page shows it" for each in unshown]
    stand_in = {each.objective: STRETCH * each.bound_ms for each in lost if each.baseline == WORK}
    return Verdict(
        state, headline, shown, found, [*unknown, *_unknown(view, state, found, objectives, shown)], stand_in
    )


def _unshown(view: ServerView, grown: Growth, objectives: Mapping[str, float]) -> list[str]:
    """The objectives that no histogram of the page can judge."""
    return [f"{short(name)} ≤ {bound:g} ms" for name, bound in objectives.items()
            if not grown.serves(HISTOGRAMS[name])]  # fmt: skip


def _missing(view: ServerView) -> list[str]:
    """What every page of a known version has, once a request has ended."""
    found = [] if WAITING in view.gauges else ["the number of waiting requests"]
    source = _source_of(view)
    if not source.translates(FINISHED) and view.gauges.get("sojourn_request_running"):
        found.append("how many requests end")
    waiting = view.gauges.get(WAITING)
    if waiting is not None and waiting.mean >= 1 and view.span("request.queue") is None and view.finished:
        found.append(f"how long requests wait: {waiting.mean:,.0f} do on average")
    if of_family(view.totals, GENERATED) is None and source.translates(GENERATED):
        older = "" if view.source == SOJOURN.key else f", or it is older than {source.title} {source.oldest}"
        why = "requests end, and the page does not count them" if view.finished else "no request has ended yet"
        found.append(f"generated tokens ({why}{older})")
    return found


def _source_of(view: ServerView) -> Source:
    return next(source for source in SOURCES if source.key == view.source)


def _facts(view: ServerView, objectives: Mapping[str, float], batch_gain: float | None) -> Means:
    """Of a server of which only means are known: no request is."""
    return Means(
        name=view.title, path="", scenario="", meta={"scenario": None}, engine=_settings(view), chosen=frozenset(),
        objectives=[{"klass": "all", **objectives}] if objectives else [], rows=_no_requests(), errors={},
        sent=max(1, round(view.finished or 0)), served=0, offered_rps=math.nan, arrivals=None, lag_p90_ms=None,
        served_rps=None, declared_shared_share=0.0, scraped=True, level="metrics", measured_by="server", steal=None,
        machine=None, server=view, batch_gain=batch_gain,
    )  # fmt: skip


@cache
def _no_requests() -> pd.DataFrame:
    """The columns of requests, without one."""
    return judged(RunDirectory("no run").requests(), [])


def _settings(view: ServerView) -> dict[str, object]:
    return {name: int(value) if value.isdigit() else value for name, value in view.reported_settings.items()}


def _plain(found: Finding, lost: Sequence[Excess]) -> Finding:
    """A finding without what only records of requests could say: how many are lost by it, and what its fix gains."""
    share = max((each.missed / each.sent for each in lost), default=0.0)
    by_work = any(each.baseline == WORK for each in lost)
    return msgspec.structs.replace(
        found,
        objective="" if by_work else found.objective,
        cohort="all requests of the window",
        goodput_lost=None if by_work or not share else min(1.0, share),
        goodput_gain=None,
        fix=Fix(change=found.fix.change, gain=NO_GAIN, basis="means over all requests of the window"),
    )


def _state(
    view: ServerView, lost: Sequence[Excess], found: Sequence[Finding], shown: Sequence[Met]
) -> tuple[State, str]:
    running = view.gauges.get("sojourn_request_running")
    waiting = view.gauges.get("sojourn_request_waiting")
    busy = any(gauge is not None and gauge.largest > 0 for gauge in (running, waiting))
    if found:
        return _state_of(found), _sentence(lost, found)
    if is_load_only(view):
        return state_of_load(view)
    if lost:
        return "cannot tell", f"{_what_is_lost(lost[0])}, and {view.title}'s metrics name no cause"
    worst = min(shown, key=lambda each: each.at_most, default=None)
    if worst is not None and 1 - worst.at_most > TOLERATED_MISSES:
        missed = f"{1 - worst.at_most:.0%} miss {worst.objective}"
        return "cannot tell", f"{missed}, and {view.title}'s metrics name no cause"
    if not view.finished and not busy:
        return "idle", "Idle: no request came in the window"
    if not view.finished and waiting is not None and waiting.mean >= 1:
        why = (
            "no counter shows how many end"
            if view.finished is None
            else "none ended in the window: use a longer window"
        )
        return "cannot tell", f"{waiting.mean:,.0f} requests wait, and {why}"
    if view.finished is None:
        return "healthy", "Healthy: requests run, and few wait; no counter shows how many end"
    if not view.finished:
        return "healthy", "Healthy: requests run, few wait, and none ended in the window"
    good = "; ".join(
        f"{_share(each)} meet {each.objective}{f' of {each.klass}' if each.klass else ''}" for each in shown
    )
    return "healthy", f"Healthy: {good or _means(view)}"


def _state_of(found: Sequence[Finding]) -> State:
    """More arrives than is served also where it is open whether a limit on the batch or the device is why."""
    keys = [each.key for each in found if each is found[0] or (each.role == "alternative" and _is_open(found[0], each))]
    return "overloaded" if found[0].key == "overload" or set(keys) >= set(BATCH_OR_DEVICE) else "degraded"


def _means(view: ServerView) -> str:
    ended, queue = f"{view.finished:,.0f} requests ended", view.span("request.queue")
    ttft = view.latencies.get(HISTOGRAMS["ttft_ms"])
    if ttft is None:
        return ended
    waited = "" if queue is None else f", of which in the queue {_ms(queue.ttft_ms or queue.mean_ms)}"
    return f"{ended}; mean time to first token {_ms(1e3 * ttft.mean)}{waited}"


def _share(each: Met) -> str:
    low, high = each.at_least, each.at_most
    if round(low, 2) == round(high, 2):
        return f"{low:.0%}"
    return f"{low:.0%} to {high:.0%}"


def _sentence(lost: Sequence[Excess], found: Sequence[Finding]) -> str:
    first = found[0]
    what = _what_is_lost(lost[0]) if lost else "The KV cache is full"
    rival = next((each for each in found[1:] if each.role == "alternative" and _is_open(first, each)), None)
    why = first.cause if rival is None else f"either {first.cause}, or {rival.cause}"
    return f"{what}, because {why}"


def _is_open(first: Finding, rival: Finding) -> bool:
    """Whether nothing that was seen separates two causes."""
    if {first.key, rival.key} == set(BATCH_OR_DEVICE):
        return not _knows_room(first)
    close = first.confidence_features.get("margin", 1.0) < CLEAR_MARGIN
    return close or first.confidence_features.get("support", 1.0) < BALANCED


def _knows_room(found: Finding) -> bool:
    """Whether it was seen what a larger batch gives."""
    return any(each.source in ROOM_SOURCES for each in found.evidence)


def _what_is_lost(excess: Excess) -> str:
    share = excess.missed / excess.sent
    if excess.objective == SERVED:
        return f"{share:.0%} of the requests end with “{excess.error}”"
    if excess.baseline == IN_LINE:
        how_long = f", about {_ms(excess.mean_ms)} each" if excess.sent > excess.missed else ""  # else none ended
        return f"{excess.missed:,} requests wait{how_long}"
    quantity = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "end-to-end latency"}[excess.objective]
    if excess.baseline == WORK:
        return f"Mean {quantity} {_ms(excess.mean_ms)} ({_ms(excess.bound_ms)} of work)"
    some = "All requests" if share > 0.995 else f"At least {share:.0%} of the requests"
    return f"{some} miss {short(excess.objective)} ≤ {excess.bound_ms:g} ms"


def _ms(value: float) -> str:
    return f"{value / 1000:,.1f} s" if value >= 10_000 else f"{value:,.0f} ms" if value >= 10 else f"{value:.1f} ms"


def _unknown(
    view: ServerView, state: State, found: Sequence[Finding], objectives: Mapping[str, float], shown: Sequence[Met]
) -> list[str]:
    sentences = [*view.no_shares, *([] if objectives or shown else [NO_OBJECTIVE])]
    if state in ("cannot tell", "degraded", "overloaded"):
        sentences.append(MORE_RECORDS.get(view.source, f"no records of {view.title} can be read: measure as a client"))
    if view.source != SOJOURN.key and view.reported_settings.get("prefix_caching", "").lower() == "false":
        sentences.append("the prefix cache is off; whether prompts repeat is in no metric, only in the probe's records")
    if found and found[0].key in BATCH_OR_DEVICE and not _knows_room(found[0]):
        sentences.append("whether a larger batch would help: the batch has not varied since the watch began")
    return sentences
