"""The six symptoms: the name of each, the lifecycles of its causes, and whether a run shows it."""

from collections.abc import Callable
from dataclasses import dataclass

from sojourn.diagnosis.evidence import Client, Records, view_of
from sojourn.diagnosis.excess import SERVED, Excess, excesses
from sojourn.diagnosis.sensor_facts import busiest_device
from sojourn.diagnosis.verdict import NEEDS_SECOND_RUN, RECORD_THE_SERVER, Status, SymptomCheck
from sojourn.metrics.request.goodput import UNMEASURED
from sojourn.metrics.request.objectives import EVERY_CLASS, SERVER_OBJECTIVES, objectives_of

# Goodput is commonly stated at 90% attainment (DistServe, OSDI 2024): up to a tenth of a class may miss an objective
# before it counts as a symptom.
TOLERATED_MISSES = 0.10
LOW_DEVICE_BUSY = 0.6  # below it a device idles for two thirds of the time it works: a host or front problem
FULL_POOL = 0.95  # of the KV blocks in use at the peak
BLOCKED = 0.05  # of the request-seconds of waiting due to KV blocks, below which a full pool hurts nobody
NO_STEPS = f"cannot be known without the server's records of its steps: {RECORD_THE_SERVER}"


@dataclass(frozen=True, slots=True)
class Symptom:
    """One complaint of users."""

    key: str
    title: str
    lifecycles: tuple[str, ...]  # where its causes may lie, most often first
    check: Callable[[Client], tuple[Status, str]] | None  # None: it takes a second run


def late(facts: Client, symptom: str) -> list[Excess]:
    """What requests spent above the objectives that belong to a symptom.

    An objective of the end or of the first answer token belongs to high_ttft where the first token took most of the
    late requests' time, else to high_itl.
    """
    return [excess for excess in excesses(facts) if symptom_of(facts, excess) == symptom]


def significant(facts: Client, excess: Excess) -> bool:
    """Whether more of a class miss an objective than is tolerated, alone or together with all else that it loses."""
    lost = int((~facts.rows.good[facts.rows.klass == excess.klass]).sum())
    alone = excess.missed > TOLERATED_MISSES * excess.sent
    together = lost > TOLERATED_MISSES * excess.sent
    return alone or (together and excess.missed > TOLERATED_MISSES / len(SERVER_OBJECTIVES) * excess.sent)


def symptom_of(facts: Client, excess: Excess) -> str:
    """The key of the symptom that an excess belongs to. A lost request never had a first token."""
    if excess.objective == SERVED:
        return "high_ttft"
    if excess.objective in ("ttfa_ms", "e2e_ms"):
        rows = facts.rows.loc[excess.missing]
        return "high_ttft" if rows.ttft_ms.mean() >= rows[excess.objective].mean() / 2 else "high_itl"
    return {"ttft_ms": "high_ttft", "tpot_ms": "high_itl"}[excess.objective]


def _latency(symptom: str, objective: str) -> Callable[[Client], tuple[Status, str]]:
    def check(facts: Client) -> tuple[Status, str]:
        if not facts.served:
            return "unknown", "no request was served" if facts.sent else "no client measured a request"
        named = [k for k in facts.rows.klass.unique() if objectives_of(k, facts.objectives).get(objective)]
        found = late(facts, symptom)
        if not named and not found:
            return "unknown", f"the run names no objective; add {objective} to `objectives` in the scenario"
        worst = max(found, key=lambda excess: excess.missed / excess.sent, default=None)
        if worst is None:
            return _judge_objective(facts, objective)
        above = f"above {worst.bound_ms:,.0f} ms ({worst.objective}), {worst.mean_ms:,.0f} ms on average"
        which = f"{worst.missed} of {worst.sent} requests{f' of {worst.klass}' if worst.klass else ''}"
        return _present(significant(facts, worst)), f"{which} are {above}"

    return check


def _judge_objective(facts: Client, objective: str) -> tuple[Status, str]:
    unmeasured = int(facts.rows[UNMEASURED[objective]].sum()) if objective in UNMEASURED else 0
    if not unmeasured:
        return "absent", f"every served request meets its {objective}"
    measured = f"{facts.served - unmeasured} of {facts.served} served requests"
    if 2 * unmeasured > facts.served:
        return "unknown", f"only of {measured} could it be measured: all tokens of the others came in one piece"
    return "absent", f"each of the {measured} of which it could be measured meets its {objective}"


def _low_device_utilisation(facts: Client) -> tuple[Status, str]:
    if (busiest := busiest_device(facts.sensors)) is not None and busiest.used is not None:
        works = f"{busiest.device} works {busiest.used:.0%} of the time in which requests are in flight, by its sensors"
        return _present(busiest.used < LOW_DEVICE_BUSY), works
    if (view := view_of(facts)) is not None:
        if view.device_busy is None:
            unseen = f"no metric of {view.title} shows how busy the device was"
            return "unknown", f"{unseen}; read those of its host with `sojourn load SCENARIO --sensors SOURCE`"
        busy = f"the device works about {view.device_busy:.0%} of the time in which requests run"
        return _present(view.device_busy < LOW_DEVICE_BUSY), f"{busy} (by {view.title}'s metrics)"
    if not isinstance(facts, Records) or facts.steps is None:
        return "unknown", _no_steps(facts)
    if facts.device_busy is None:
        return "unknown", f"no request with records of both client and server: {RECORD_THE_SERVER}"
    busy = f"the device works {facts.device_busy:.0%} of the time in which a request is in the server"
    return _present(facts.device_busy < LOW_DEVICE_BUSY), busy


def _no_steps(facts: Client) -> str:
    if isinstance(facts, Records) and facts.servers:
        return f"each server of a fleet has steps of its own: sojourn diagnose RUN/{next(iter(facts.servers))}"
    return NO_STEPS


def _present(shows: bool) -> Status:
    return "present" if shows else "absent"


def _vram_fills_quickly(facts: Client) -> tuple[Status, str]:
    if (view := view_of(facts)) is not None:
        if view.kv_largest is None:
            return "unknown", f"no metric of {view.title} shows the use of its KV cache"
        preemptions = "" if view.preemptions is None else f", {view.preemptions:,.0f} preemptions"
        full = (view.waiting.with_kv_full or 0.0) if view.waiting is not None else 0.0
        hurts = bool(view.preemptions) or full > BLOCKED
        every_s = view.seconds / max(1, view.scrapes - 1)
        often = "once per second" if every_s < 1.5 else f"every {every_s:.0f} s"
        peak = f"KV use peaks at {view.kv_largest:.0%} in {view.title}'s gauge, sampled {often}"
        return _present(view.kv_largest >= FULL_POOL and hurts), f"{peak}{preemptions}"
    if not isinstance(facts, Records) or facts.steps is None:
        return "unknown", _no_steps(facts)
    steps = facts.steps
    waits = facts.waits.get("kv_blocks", 0.0)
    peak = f"KV use peaks at {steps.kv_use_max:.0%} of {steps.pool_blocks} blocks"
    hurts = steps.preemptions > 0 or waits > BLOCKED
    harm = f"{steps.preemptions} preemptions, {waits:.0%} of the waiting is for blocks"
    return _present(steps.kv_use_max >= FULL_POOL and hurts), f"{peak}, {harm}"


SYMPTOMS: tuple[Symptom, ...] = (
    Symptom("high_ttft", "High time to first token", ("request", "compute", "memory", "token"),
            _latency("high_ttft", "ttft_ms")),
    Symptom("high_itl", "High inter-token latency", ("compute", "request", "memory", "token"),
            _latency("high_itl", "tpot_ms")),
    Symptom("low_device_utilisation", "Low device utilisation", ("compute", "request", "token"),
            _low_device_utilisation),
    Symptom("vram_fills_quickly", "VRAM fills quickly", ("memory", "request"), _vram_fills_quickly),
    Symptom("product_latency_poor", "Good benchmark, poor product latency", ("request", "token", "memory"), None),
    Symptom("devices_do_not_help", "More devices do not help", ("compute", "request", "memory"), None),
)  # fmt: skip
BY_KEY = {symptom.key: symptom for symptom in SYMPTOMS}


def check(facts: Client, symptom: Symptom) -> SymptomCheck:
    """One symptom on one run. Those that take two runs are unknown."""
    if symptom.check is None:
        status, reason = "unknown", NEEDS_SECOND_RUN
    else:
        status, reason = symptom.check(facts)
    return make_check(symptom, status, reason)


def make_check(symptom: Symptom, status: Status, reason: str) -> SymptomCheck:
    return SymptomCheck(symptom=symptom.key, title=symptom.title, status=status, reason=reason,
                        lifecycles=list(symptom.lifecycles))  # fmt: skip


def cohort(facts: Client, excess: Excess) -> str:
    """The requests that miss an objective: class, number, and whether their prompts are longer than the others'."""
    rows = facts.rows[facts.rows.klass == excess.klass]
    hit = rows.loc[excess.missing].prompt_tokens.astype("float64").median()
    spared = rows.drop(excess.missing).prompt_tokens.astype("float64").median()
    name = excess.klass if excess.klass and excess.klass != EVERY_CLASS else "all classes"
    late = f"{name}, {excess.missed} of {excess.sent} requests"
    if spared == spared and hit == hit and spared > 0 and hit >= 2 * spared:
        late += f", prompts of {hit:,.0f} tokens (median) against {spared:,.0f}"
    return late
