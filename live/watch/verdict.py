"""The verdict on a window: the causes that a diagnosis knows, asked about what its metrics show."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec
import pandas as pd

from sojourn.diagnosis.adjudicate import adjudicate
from sojourn.diagnosis.evidence import Accounts, Means
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.expectation import STRETCH
from sojourn.diagnosis.findings import finding_of_symptom, findings
from sojourn.diagnosis.proposals import is_refuted, ruled_out
from sojourn.diagnosis.sensor_facts import SensorFacts, steal_of
from sojourn.diagnosis.server_means import with_means
from sojourn.diagnosis.state import BALANCED, CLEAR_MARGIN
from sojourn.diagnosis.statements.accounts import ROOM_SOURCES
from sojourn.diagnosis.suspects import suspects_of
from sojourn.diagnosis.symptoms import BY_KEY, TOLERATED_MISSES, check
from sojourn.diagnosis.verdict import Finding, Fix
from sojourn.interop.sources.pressure import GAPS, GENERATED, WAITING
from sojourn.interop.sources.registry import SOURCES
from sojourn.interop.sources.sglang import SGLANG
from sojourn.interop.sources.sojourn import SOJOURN
from sojourn.interop.sources.source import Source
from sojourn.interop.sources.translate import Growth, key, of_family
from sojourn.interop.sources.view import FINISHED, ServerView
from sojourn.interop.sources.vllm import VLLM
from sojourn.live.watch.document import Met, State
from sojourn.live.watch.expectation import EASED, FEWEST, HISTOGRAMS, IN_LINE, WORK, lost_time, met
from sojourn.live.watch.load_only import is_load_only, state_of_load
from sojourn.metrics.request.goodput import judged
from sojourn.metrics.request.objectives import short
from sojourn.metrics.run.directory import RunDirectory

KV_FILLS = BY_KEY["vram_fills_quickly"]
KEPT_S = 180.0  # that a cause stands for time that is lost further, while its signs do not show
GIVEN_UP = 0.2  # of the requests, by their clients: what they would have waited is in no histogram
NOTHING_CAME = "Requests run, and no token and no end came in the window"
NO_CAUSE = "{}'s metrics name no cause"
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
    ruled_out: list[str]  # causes that look likely, and what on the page refutes them
    lost: frozenset[str]  # the objectives by which time is lost
    seen_s_ago: float  # when the signs of its first finding were there
    stand_in: dict[str, float]  # without objectives: what would be one for the time that is lost, in ms


def verdict(
    view: ServerView, grown: Growth, objectives: Mapping[str, float], batch_gain: float | None = None,
    before: Verdict | None = None, since_s: float = 0.0, sensors: SensorFacts | None = None,
) -> Verdict:  # fmt: skip
    """What the window shows. Abstains where time is lost and no cause that its metrics can name explains it.

    `before`, of so long ago: while time is lost, half of each limit is enough, and a cause whose signs come and go
    stands, as long as nothing refutes it.
    """
    facts = with_means(_facts(view, objectives, batch_gain, sensors))
    shown = met(grown, view, objectives)
    ease = EASED if before is not None and before.lost else 1.0
    lost = lost_time(facts, grown, objectives, shown, ease)
    names, found, seen_s_ago = frozenset(each.objective for each in lost), _findings(facts, lost), 0.0
    if lost and not found:
        found, seen_s_ago = _still_true(facts, before, names, since_s)
    unshown = _unshown(view, grown, objectives)
    judged = {name: bound for name, bound in objectives.items() if grown.serves(HISTOGRAMS[name])}
    state, headline = _state(view, lost, found, shown, judged, ease)
    if seen_s_ago:
        headline += f" (its signs showed {seen_s_ago:.0f} s ago)"
    missing = [*unshown, *_missing(view)]
    if state == "healthy" and missing:
        state, headline = "cannot tell", f"No metric of {view.title}'s page shows {', '.join(missing)}"
    unknown = [f"{each} is unknown: no metric of the page shows it" for each in unshown]
    unknown += [_bounds(view, each) for each in shown if each.between_ms is not None]
    stand_in = {each.objective: STRETCH * each.bound_ms for each in lost if each.baseline == WORK}
    return Verdict(
        state, headline, shown, found, [*unknown, *_unknown(view, state, found, objectives, shown)],
        [each for each in ruled_out(facts, lost) if state != "healthy"], names, seen_s_ago, stand_in,
    )  # fmt: skip


def _findings(facts: Means | Accounts, lost: Sequence[Excess]) -> list[Finding]:
    judgement = adjudicate(facts, lost, suspects_of(facts, lost), None)
    found = [_plain(each, lost) for each in findings(facts, judgement)]
    if not any(each.key == "kv_pool" for each in found) and check(facts, KV_FILLS).status == "present":
        pool = finding_of_symptom(facts, KV_FILLS)
        found += [] if pool is None else [_plain(pool, lost)]
    return found


def _still_true(
    facts: Means | Accounts, before: Verdict | None, lost: frozenset[str], since_s: float
) -> tuple[list[Finding], float]:
    """The findings of before, where the same time is lost and nothing refutes them, and when their signs showed."""
    if before is None or not before.lost & lost or before.seen_s_ago + since_s > KEPT_S:
        return [], 0.0
    found = [each for each in before.findings if not is_refuted(facts, each.key)]
    return found, before.seen_s_ago + since_s if found else 0.0


def _unshown(view: ServerView, grown: Growth, objectives: Mapping[str, float]) -> list[str]:
    """The objectives that no histogram of the page can judge."""
    return [f"{short(name)} ≤ {bound:g} ms" for name, bound in objectives.items()
            if not grown.serves(HISTOGRAMS[name])]  # fmt: skip


def _missing(view: ServerView) -> list[str]:
    """What every page of a known version has, once a request has ended."""
    source = _source_of(view)
    found = []
    if WAITING not in view.gauges:
        behind = "" if source.translates(WAITING) else " (they wait in the server behind it: watch that page)"
        found.append(f"the number of waiting requests{behind}")
    if not source.translates(FINISHED) and view.gauges.get("sojourn_request_running"):
        found.append("how many requests end")
    waiting = view.gauges.get(WAITING)
    if waiting is not None and waiting.mean >= 1 and view.queue is None and view.finished:
        found.append(f"how long requests wait: {waiting.mean:,.0f} do on average")
    if of_family(view.totals, GENERATED) is None and source.translates(GENERATED):
        older = "" if view.source == SOJOURN.key else f", or it is older than {source.title} {source.oldest}"
        why = "requests end, and the page does not count them" if view.finished else "no request has ended yet"
        found.append(f"generated tokens ({why}{older})")
    return found


def _source_of(view: ServerView) -> Source:
    return next(source for source in SOURCES if source.key == view.source)


def _facts(
    view: ServerView, objectives: Mapping[str, float], batch_gain: float | None, sensors: SensorFacts | None
) -> Means:
    """Of a server of which only means are known: no request is."""
    return Means(
        name=view.title, path="", scenario="", meta={"scenario": None}, engine=_settings(view), chosen=frozenset(),
        objectives=[{"klass": "all", **objectives}] if objectives else [], rows=_no_requests(), errors={},
        sent=max(1, round(view.finished or 0)), served=0, offered_rps=math.nan, arrivals=None, lag_p90_ms=None,
        served_rps=None, declared_shared_share=0.0, scraped=True, level="metrics", measured_by="server",
        steal=steal_of(sensors), machine=None, sensors=sensors, server=view, batch_gain=batch_gain,
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
    view: ServerView, lost: Sequence[Excess], found: Sequence[Finding], shown: Sequence[Met],
    objectives: Mapping[str, float], ease: float,
) -> tuple[State, str]:  # fmt: skip
    running = view.gauges.get("sojourn_request_running")
    waiting = view.gauges.get("sojourn_request_waiting")
    busy = any(gauge is not None and gauge.last > 0 for gauge in (running, waiting))
    if found:
        return _state_of(found), _sentence(lost, found)
    if is_load_only(view):
        return state_of_load(view)
    if lost:
        return "cannot tell", f"{_what_is_lost(lost[0])}, and {NO_CAUSE.format(view.title)}"
    worst = min(shown, key=lambda each: each.at_most, default=None)
    if worst is not None and 1 - worst.at_most > ease * TOLERATED_MISSES:
        missed = f"{1 - worst.at_most:.0%} miss {worst.objective}"
        return "cannot tell", f"{missed}, and {NO_CAUSE.format(view.title)}"
    if not view.finished and not busy:
        came = of_family(view.totals, GENERATED)
        return "idle", f"Idle: no request {'runs, and none ended' if came else 'came'} in the window"
    if unchecked := _unchecked(view, shown, objectives):
        return "cannot tell", unchecked
    good = "; ".join(
        f"{_share(each)} meet {each.objective}{f' of {each.klass}' if each.klass else ''}" for each in shown
    )
    return "healthy", f"Healthy: {good or _means(view)}"


def _unchecked(view: ServerView, shown: Sequence[Met], objectives: Mapping[str, float]) -> str:
    """What keeps requests without a loss from being healthy: of them, it is not known; "" where nothing does."""
    waiting, ended = view.gauges.get(WAITING), view.finished or 0.0
    if ended < FEWEST and waiting is not None and waiting.mean >= 1:
        ends = "no counter shows how many end"
        if view.finished is not None:
            ends = f"{ended:,.0f} ended in the window: too few for a verdict"
        return f"{waiting.mean:,.0f} requests wait, and {ends}"
    given_up = view.totals.get(key(FINISHED, (("outcome", "abort"),)), 0.0)
    if given_up >= FEWEST and given_up >= GIVEN_UP * ended:
        return (
            f"{given_up:,.0f} of {ended:,.0f} requests were given up by their clients: how long they would have taken "
            "is in no histogram"
        )
    judged = {each.source for each in shown}
    for name, bound in objectives.items():
        if HISTOGRAMS[name] not in judged:
            return f"No request of the window shows its {short(name)} yet, so that ≤ {bound:g} ms is not judged"
    unsure = next((each for each in shown if each.at_least < 1 - TOLERATED_MISSES), None)
    if unsure is not None:
        return (
            f"Between {unsure.at_least:.0%} and {unsure.at_most:.0%} meet {unsure.objective}: {_bounds(view, unsure)}"
        )
    if not ended and of_family(view.totals, GENERATED) == 0:
        return NOTHING_CAME
    return ""


def _bounds(view: ServerView, shown: Met) -> str:
    """Which objectives the histogram of one can judge."""
    low, high = shown.between_ms or (0.0, None)
    bounds = " and ".join(f"{bound:g}" for bound in (low, high) if bound)
    return f"{view.title} counts at {bounds} ms, and only such a bound can be judged"


def _state_of(found: Sequence[Finding]) -> State:
    """More arrives than is served also where it is open whether a limit on the batch or the device is why."""
    keys = [each.key for each in found if each is found[0] or (each.role == "alternative" and _is_open(found[0], each))]
    return "overloaded" if found[0].key == "overload" or set(keys) >= set(BATCH_OR_DEVICE) else "degraded"


def _means(view: ServerView) -> str:
    number, queue = view.finished or 0.0, view.queue
    ended = f"{number:,.0f} request{'s' * (round(number) != 1)} ended" if number else "so far, and none ended yet"
    ttft, gaps = view.latencies.get(HISTOGRAMS["ttft_ms"]), view.latencies.get(GAPS)
    if view.finished is None:
        return "requests run, and few wait; no counter shows how many end"
    if ttft is None:
        return ended
    if not number and gaps is not None:
        return f"{ended}; mean time to first token {_ms(1e3 * ttft.mean)}, between tokens {_ms(1e3 * gaps.mean)}"
    waited = "" if queue is None else f", of which in the queue {_ms(queue.ttft_ms or queue.mean_ms)}"
    return f"{ended}; mean time to first token {_ms(1e3 * ttft.mean)}{waited}"


def _share(each: Met) -> str:
    low, high = each.at_least, each.at_most
    if round(low, 2) == round(high, 2):
        return f"{low:.0%}"
    return f"{low:.0%} to {high:.0%}"


def _sentence(lost: Sequence[Excess], found: Sequence[Finding]) -> str:
    first = found[0]
    of_it = (each for each in lost if first.objective.startswith(short(each.objective)))
    what = _what_is_lost(next(of_it, lost[0])) if lost else "The KV cache is full"
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
