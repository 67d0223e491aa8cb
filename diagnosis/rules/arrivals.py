"""Causes in the load itself: bursts, more than the server can do, and answers that are longer than the objective."""

import numpy as np

from sojourn.diagnosis.capacity import COMFORTABLE, FULL, LARGEST_BATCH, batch_within_tpot, best_load, load
from sojourn.diagnosis.excess import SERVED, Excess, accounts_of
from sojourn.diagnosis.facts import Facts, tightest
from sojourn.diagnosis.rules.cause import CONTENTION, Gain, Proposal, cause
from sojourn.diagnosis.rules.prefix import avoidable_prompts
from sojourn.diagnosis.rules.refusals import REFUSED
from sojourn.diagnosis.rules.shared_evidence import (
    excess_evidence,
    load_evidence,
    missing_share,
    residual_evidence,
)
from sojourn.diagnosis.rules.speculation import avoidable_drafts
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change

OFFERED_LOAD = "offered load"  # the object of the one cause that no policy can mend
NEARLY_FULL = 0.8  # load / capacity from which overload is looked at: the estimate is good to a tenth, and half of that
DEVICE_IDLES = 0.8  # of the time with a request in the server: a device that works less is not what is short
NEARLY_ALL = 0.9  # of the objective: what is left is not enough for any first token
LONGER_ANSWERS = 1.5  # times the answers of those in time: below it the speed of a token decides


@cause(lifecycles=("request",), object="arrivals", kind="workload", accounts=CONTENTION,
       needs=("excess", "load"), rival="lost capacity: a server that is slower than it was",
       rival_key="overload")  # fmt: skip
def burst(facts: Facts, excess: Excess) -> Proposal | None:
    """The mean load is moderate, and arrivals come so close together that their backlog alone breaks the objective."""
    now, best, arrivals = load(facts), best_load(facts), facts.arrivals
    if arrivals is None or not arrivals.varied or now >= FULL or best <= 0:
        return None
    capacity = facts.offered_rps / best
    in_burst, peak = _in_backlog(facts, excess, capacity)
    if in_burst < 0.5:  # most late requests came when there was no backlog
        return None
    if arrivals.bursty:
        how, peaks = f"arrivals come in bursts (coefficient of variation {arrivals.cv:.1f})", "bursts"
        spread = ", or a limit for each client that spreads its bursts"
    else:
        rates = f"up to {arrivals.peak_rps:.1f} requests/s, {facts.offered_rps:.1f} on average"
        how, peaks, spread = f"the rate of arrivals changes ({rates})", "the peak", ""
    return Proposal(
        cause=f"{how}; at a load of {now:.2f} of the capacity their backlog alone breaks the objective",
        evidence=[
            evidence(f"the gaps between arrivals vary with a coefficient of {arrivals.cv:.1f}, neighbours with "
                     f"{arrivals.local_cv:.1f}; independent arrivals have 1.0",
                     arrivals.cv, "ratio", "client: due_ns"),
            evidence(f"{in_burst:.0%} of the late requests came into a backlog that a server of {capacity:.1f} "
                     f"requests/s needs more than half of the objective to clear; the largest took {peak:.1f} s",
                     in_burst, "share", "client: due_ns; steps: fit of wall time", weight=2),
            *excess_evidence(excess, CONTENTION),
            load_evidence(f"the mean load is {now:.2f} of the capacity", now, weight=2),
        ],
        measurement=f"as many requests at a constant {facts.offered_rps:.1f} requests/s",
        settings=None,
        if_cause=f"{missing_share(excess)} falls to none or few",
        if_rival=f"load / capacity exceeds {now:.2f}, and requests outside of {peaks} are late too",
        change=f"capacity for the peak instead of the mean{spread}",
        claims=dict.fromkeys(CONTENTION, in_burst),
        fixes=(Change(arrivals="even"),),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object=OFFERED_LOAD, kind="capacity", accounts=CONTENTION,
       needs=("load",), rival="a fault that slows every step", rival_key="slow_device")  # fmt: skip
def overload(facts: Facts, excess: Excess | None) -> Proposal | None:
    """More arrives than the device can serve, whatever the policy. Also without an excess, where requests fail."""
    if excess is not None and excess.objective == SERVED and not excess.error.startswith(REFUSED):
        return None
    now, best = load(facts), best_load(facts)
    if best < NEARLY_FULL:
        return None
    capacity, batch = facts.offered_rps / best, batch_within_tpot(facts)
    limit = "meets every objective on the time per output token" if batch < LARGEST_BATCH else "the model reaches"
    admit = COMFORTABLE * capacity
    return Proposal(
        cause=f"{facts.offered_rps:.1f} requests/s arrive, and the device serves at most {capacity:.1f} of this "
        f"length: {_policy(facts)}" if best >= FULL else
        f"{facts.offered_rps:.1f} requests/s arrive, {best:.0%} of what the device serves of this length: so near to "
        "its capacity the queue is longer than the objective",
        evidence=[
            load_evidence(f"load / capacity is {now:.2f} with these settings, and {best:.2f} at the best batch of "
                          f"{batch:.0f} that {limit}", best, supports=best >= FULL, weight=2),
            *excess_evidence(excess, CONTENTION),
            *_growth(facts),
            *_busy(facts),
            *residual_evidence(facts),
            *avoidable_prompts(facts),
            *avoidable_drafts(facts, best),
        ],
        measurement=f"the same scenario at {admit:.1f} requests/s",
        settings=None,
        if_cause=f"step times stay as they are, and {missing_share(excess)} falls to none or few",
        if_rival="steps of the same composition still take as long, and the time per output token stays high",
        change=f"{facts.offered_rps / admit:.1f} times the devices, or admit at most {admit:.1f} requests/s and answer "
        "429 to the rest",
        explained=None if excess is None or excess.accounts else 1.0,
        capacity_rps=capacity,
        fixes=(Change(arrival_rate=min(1.0, COMFORTABLE / best)),),
        gain=Gain(f"load / capacity {best:.2f} → {COMFORTABLE:.2f}",
                  basis="step times fitted to this run; good to about 10 %"),
    )  # fmt: skip


def _policy(facts: Facts) -> str:
    """Whether a policy could help. Without records of prefixes nobody knows what a cache that is off would spare."""
    unknown = facts.prefix is None and facts.measured_by == "server"
    if facts.engine.get("prefix_caching") is False and unknown:
        return "the prefix cache is off, and no policy will help unless prompts repeat"
    return "no policy will help"


@cause(lifecycles=("token", "request"), object="length of the answers", kind="workload",
       needs=("excess", "work"), rival="a decode step that is too slow", rival_key="slow_decode")  # fmt: skip
def long_outputs(facts: Facts, excess: Excess) -> Proposal | None:
    """Answers are so long that they cannot end in time, though each token comes as fast as those of the others."""
    if excess.objective != "e2e_ms":
        return None
    rows = facts.rows[(facts.rows.klass == excess.klass) & (facts.rows.status == "ok")]
    late, good = rows.loc[excess.missing], rows.drop(excess.missing)
    longer, usual = (float(part.output_tokens.astype("float64").mean()) for part in (late, good))
    slower, speed = (float(part.tpot_ms.astype("float64").median()) for part in (late, good))
    if not len(good) or not usual or longer < LONGER_ANSWERS * usual:
        return None
    # What the tokens beyond the usual number take at the usual speed, by account
    each = accounts_of(good, "tpot_ms").mean().fillna(0)
    claims = {
        name: min(1.0, float(each[name]) * (longer - usual) / excess.accounts[name])
        for name in each.index if each[name] > 0 and excess.accounts.get(name, 0.0) > 0
    }  # fmt: skip
    fits = (excess.bound_ms - float(late.ttft_ms.mean())) / max(speed, 1e-9)
    # Answers of all lengths are late where tokens are slow; where only their number is too large, none fits even fast
    fastest = float(rows.tpot_ms.astype("float64").quantile(0.1)) / slowness_of_steps(facts)
    needed_ms = fastest * longer
    return Proposal(
        cause=f"late requests ask for {longer:,.0f} tokens of output, those in time for {usual:,.0f}; at "
        f"{speed:.1f} ms a token {max(0.0, fits):,.0f} would fit the {excess.bound_ms:,.0f} ms",
        evidence=[
            *excess_evidence(excess, tuple(claims)),
            evidence(f"late answers have {longer / usual:.1f} times as many tokens as those in time", longer / usual,
                     "ratio", "requests: output_tokens", weight=2),
            evidence(f"a token of a late answer takes {slower:.1f} ms, one of the others {speed:.1f} ms",
                     slower / max(speed, 1e-9), "ratio", "client: chunk_ns", supports=slower < 1.25 * speed),
            evidence(f"even at {fastest:.1f} ms, the fastest tenth at normal speed, that number of tokens takes "
                     f"{needed_ms:,.0f} ms of the {excess.bound_ms:,.0f} ms", needed_ms / excess.bound_ms, "ratio",
                     "client: chunk_ns; run.json: speed_reference",
                     supports=needed_ms >= NEARLY_ALL * excess.bound_ms, weight=3),
            *residual_evidence(facts),
        ],
        measurement=f"the same scenario with at most {max(1.0, fits):,.0f} tokens of output",
        settings=None,
        if_cause=f"{missing_share(excess)} falls to none, at the same time per token",
        if_rival=f"{missing_share(excess)} stays, since each token is slow",
        change=f"a limit of {max(1.0, fits):,.0f} output tokens, or an objective that grows with the answer",
        claims=claims,
    )  # fmt: skip


def slowness_of_steps(facts: Facts) -> float:
    """What steps take of what they take at normal speed, device, draws and host together; 1 where nobody knows it."""
    speed = facts.speed()
    if speed is None or speed.source != "reference":
        return 1.0
    parts = [each for each in (speed.device, speed.sampling, *speed.host.values()) if each is not None]
    return max(1.0, sum(each.took_ms for each in parts) / max(sum(each.normal_ms for each in parts), 1e-9))


def _in_backlog(facts: Facts, excess: Excess, capacity_rps: float) -> tuple[float, float]:
    """Share of the late requests that met a backlog of half their objective, and the largest backlog in seconds.

    The backlog is that of a fluid queue with one server of `capacity_rps`, fed with the recorded arrivals. A request
    is also in a backlog that builds within its bound after it: those behind it share its steps.
    """
    bound_s = (tightest(facts, "ttft_ms") or excess.bound_ms) / 1e3
    due_s = facts.rows.due_ns.to_numpy(dtype="float64") / 1e9  # ascending
    backlog_s, level_s = [], 0.0
    for gap_s in np.diff(due_s, prepend=due_s[:1]):
        level_s = max(0.0, level_s - gap_s) + 1 / capacity_rps
        backlog_s.append(level_s)
    last = np.searchsorted(due_s, due_s + bound_s, side="right")
    late = [facts.rows.index.get_loc(label) for label in excess.missing]
    met = sum(max(backlog_s[place : last[place]]) >= bound_s / 2 for place in late)
    return (met / len(late) if late else 0.0), max(backlog_s, default=0.0)


def _busy(facts: Facts) -> list[Evidence]:
    """A device that idles while requests are in the server is not what is short."""
    if facts.device_busy is None:
        return []
    return [
        evidence(f"the device works {facts.device_busy:.0%} of the time in which a request is in the server",
                 facts.device_busy, "share", "steps: device_ns; requests: arrived_ns, finished_ns",
                 supports=facts.device_busy >= DEVICE_IDLES)
    ]  # fmt: skip


def _growth(facts: Facts) -> list[Evidence]:
    """Whether waits grow over the run, as they must under overload."""
    ttft = facts.rows.ttft_ms.astype("float64").dropna()
    third = len(ttft) // 3
    if third < 5:
        return []
    first, last = float(ttft.iloc[:third].mean()), float(ttft.iloc[-third:].mean())
    return [
        evidence(f"the mean time to first token goes from {first:,.0f} ms in the first third of the run to "
                 f"{last:,.0f} ms in the last", last / max(first, 1e-9), "ratio", "client: first_token_ns, due_ns",
                 supports=last > first)
    ]  # fmt: skip
