"""Causes in the lifecycle of a request: admission, queue, the other requests in a step, and the arrivals themselves."""

import numpy as np

from metrics.diagnosis.capacity import (
    COMFORTABLE,
    FULL,
    LARGEST_BATCH,
    batch_within_tpot,
    best_load,
    comfortable_batch,
    kv_batch,
    load,
)
from metrics.diagnosis.excess import Excess
from metrics.diagnosis.facts import Facts, tightest
from metrics.diagnosis.rules.cause import CONTENTION, QUEUE, Gain, Proposal, all_of, cause
from metrics.diagnosis.rules.shared_evidence import (
    blamed_group,
    excess_evidence,
    load_evidence,
    long_prompt_share,
    missing_share,
    residual_evidence,
)
from metrics.diagnosis.verdict import Evidence, evidence
from metrics.replay.prediction import Change

OFFERED_LOAD = "offered load"  # the object of the one cause that no policy can mend
INTERFERENCE = ("request.interference",)
LONG_PROMPT = 4.0  # times the median prompt of the late requests: it fills steps that they would share
BLAMED = 0.5  # of all delay by prompts: who causes more than half of it is the offender
SMALLEST_BUDGET = 32  # below it a step's fixed cost outweighs the tokens it carries on any device
WORTH_RAISING = 0.8  # a larger batch must lower load / capacity by a fifth, or the cap is not what limits
# What a policy that the engine offers does, and why it holds requests back.
HOLDS_BACK = {"static": "static batching admits nobody before the last request of its batch has ended"}


@cause(lifecycles=("request",), object="admission policy", kind="policy", accounts=QUEUE,
       reason="policy", needs=("excess", "steps"),
       rival="overload: the device is full, whoever is admitted")  # fmt: skip
def admission_policy(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait because the policy says so, not because a place, tokens or blocks are short."""
    steps, waited = facts.steps, facts.waits.get("policy", 0.0)
    policy, limit = str(facts.engine.get("policy") or "fcfs"), facts.engine.get("max_long_prefills")
    by_limit = policy not in HOLDS_BACK
    if best_load(facts) >= FULL or (by_limit and not limit):  # on a full device, admitting more would move the queue
        return None
    why = f"at most {limit} long prompts are computed at a time" if by_limit else HOLDS_BACK[policy]
    cap = facts.engine.get("max_num_seqs")
    room = f", while {steps.mean_batch:.1f} of {cap} places were taken" if cap else ""
    settings = {"max_long_prefills": 2 * int(limit)} if by_limit else {"policy": "fcfs"}
    return Proposal(
        object="limit of long prompts (max_long_prefills)" if by_limit else "admission policy",
        cause=f"{why}{room}",
        evidence=[
            *excess_evidence(excess, QUEUE),
            evidence(f"{waited:.0%} of the waiting was for the policy: neither a place, nor tokens, nor KV blocks were "
                     "short", waited, "share", "requests: waits; steps: refusals"),
            load_evidence(f"load / capacity is {load(facts):.2f}", load(facts), supports=load(facts) < FULL),
            *blamed_group(facts, excess),
        ],
        measurement=f"the same scenario with {', '.join(f'{name}={value}' for name, value in settings.items())}",
        settings=settings,
        if_cause=f"waiting for the policy falls from {waited:.0%} to none",
        if_rival=f"{missing_share(excess)} stays, and the waiting is for places or tokens instead",
        fixes=(Change(settings=settings),),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object="batch cap (max_num_seqs)", kind="policy",
       accounts=QUEUE, reason="batch_cap", needs=("excess", "load"),
       rival="overload: the device is full at any batch")  # fmt: skip
def batch_cap(facts: Facts, excess: Excess) -> Proposal | None:
    """Requests wait for a place in the batch while the device could take more of them in a step."""
    steps, capped = facts.steps, facts.waits.get("batch_cap", 0.0)
    roomy = min(batch_within_tpot(facts), kv_batch(facts))
    now, raised = load(facts), load(facts, batch=roomy)
    if raised >= FULL or raised > WORTH_RAISING * now:
        return None
    cap = facts.engine.get("max_num_seqs") or round(steps.mean_batch)
    value = max(int(min(comfortable_batch(facts), roomy)), 2 * cap)
    return Proposal(
        cause=f"the batch is capped at {cap} requests, while the device and the KV pool could take {int(roomy)}",
        evidence=[
            *excess_evidence(excess, QUEUE),
            *blamed_group(facts, excess),
            evidence(f"{capped:.0%} of the waiting was for the batch cap: refused by it, or behind a request that was",
                     capped, "share", "requests: waits; steps: refusals"),
            evidence(f"at least a fifth of the KV pool was free in {steps.waited_with_kv_free:.0%} of that waiting",
                     steps.waited_with_kv_free, "share", "steps: waiting, blocks_free, blocks_reusable",
                     supports=steps.waited_with_kv_free > 0.5),
            load_evidence(f"load / capacity is {now:.2f} with this cap and {raised:.2f} without", now),
        ],
        measurement="the same scenario with a larger batch",
        settings={"max_num_seqs": value},
        if_cause=f"load / capacity falls from {now:.2f} to about {load(facts, batch=value):.2f}",
        if_rival=f"{missing_share(excess)} stays, and the time per output token grows with the batch",
        fixes=(Change(settings={"max_num_seqs": value}),),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object="token budget of a step", kind="policy",
       accounts=CONTENTION, reason="token_budget", needs=("excess", "step model"), rival="overload")  # fmt: skip
def token_budget(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompts wait for a token budget so small that every step's fixed cost is paid for few tokens."""
    steps, model, short = facts.steps, facts.steps.model, facts.waits.get("token_budget", 0.0)
    budget, bound = facts.engine.get("max_num_batched_tokens"), tightest(facts, "tpot_ms")
    if (
        not isinstance(budget, int) or model.step_ns < model.token_ns * budget
    ):  # a full step already pays mostly for its tokens
        return None
    room = (bound * 1e6 - model.step_ns) / max(model.token_ns, 1) if bound else 8 * budget
    value = int(min(8 * budget, room)) // SMALLEST_BUDGET * SMALLEST_BUDGET
    if value < 2 * budget:
        return None
    faster = value / model.predict(value, value) / (budget / model.predict(budget, budget))
    return Proposal(
        cause=f"a step may hold {budget} tokens, and its fixed cost of {model.step_ns / 1e6:.1f} ms outweighs them",
        evidence=[
            *excess_evidence(excess, CONTENTION),
            evidence(f"{short:.0%} of the waiting was refused by the token budget", short, "share",
                     "requests: waits; steps: refusals"),
            evidence(f"steps were {steps.budget_use:.0%} full while somebody waited", steps.budget_use, "share",
                     "steps: new_tokens, budget, waiting", supports=steps.budget_use > 0.8),
        ],
        measurement="the same scenario with a larger token budget",
        settings={"max_num_batched_tokens": value},
        if_cause=f"prompt tokens a second rise by about {faster:.1f} times",
        if_rival=f"{missing_share(excess)} stays",
        fixes=(Change(settings={"max_num_batched_tokens": value}),),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object="token budget of a step", kind="policy",
       accounts=CONTENTION, needs=("excess", "step model"),
       rival="a slow device: steps that are long for what they hold")  # fmt: skip
def long_prompts(facts: Facts, excess: Excess) -> Proposal | None:
    """Steps filled by others' long prompts make everybody in them wait."""
    prompts = facts.rows.set_index("request_id").server_prompt_tokens.astype("float64")
    typical = float(prompts.loc[facts.rows.request_id[excess.missing]].median())
    share, offenders = long_prompt_share(facts, excess, LONG_PROMPT * typical)
    if share < BLAMED or not len(offenders):
        return None
    classes = ", ".join(sorted(set(offenders.klass.dropna()) - {""}))
    who = f"{len(offenders)} requests{f' of {classes}' if classes else ''} with "
    who += f"{offenders.prompt_tokens.median():,.0f} prompt tokens"
    blamed = evidence(f"{share:.0%} of the delay that others cost late requests is caused by {who}; late requests have "
                      f"{typical:,.0f}", share, "share", "steps: new_tokens, kinds, request_ids; requests")  # fmt: skip
    return _smaller_chunks(facts, excess, f"{who} fill whole steps, and everybody in them waits", blamed)


@cause(lifecycles=("request", "compute"), object="token budget of a step", kind="policy",
       accounts=INTERFERENCE, needs=("excess", "step model"),
       rival="a slow device: steps that are long for what they hold")  # fmt: skip
def prompt_interference(facts: Facts, excess: Excess) -> Proposal | None:
    """Prompt chunks of ordinary length that make a mixed step longer than the objective."""
    bound, mixed_ns = tightest(facts, "tpot_ms"), facts.steps.prefill_step_p95_ns
    if bound is None or mixed_ns is None or mixed_ns / 1e6 <= bound:
        return None
    return _smaller_chunks(facts, excess, "others' prompt chunks make the steps longer than the objective")


def _smaller_chunks(facts: Facts, excess: Excess, statement: str, *blamed: Evidence) -> Proposal | None:
    """One remedy for both: a budget with which a mixed step meets the time per output token."""
    steps, bound = facts.steps, tightest(facts, "tpot_ms")
    if steps.prefill_tokens_p95 is None:
        return None
    mixed_ms, budget = steps.prefill_step_p95_ns / 1e6, facts.engine.get("max_num_batched_tokens")
    target_ms = bound if bound is not None else mixed_ms / 2
    context = steps.mean_batch * (facts.work.context_tokens if facts.work else 0)
    room = (target_ms * 1e6 - steps.model.predict(0, context)) / max(steps.model.token_ns, 1)
    value = max(SMALLEST_BUDGET, int(room) // SMALLEST_BUDGET * SMALLEST_BUDGET)
    removed = max(0.0, 1 - value / steps.prefill_tokens_p95)
    if removed <= 0 or (isinstance(budget, int) and value >= budget):
        return None
    longest = float(facts.rows.server_prompt_tokens.astype("float64").max())
    longest_s = longest / value * target_ms / 1e3
    plain_ms = (steps.decode_step_p50_ns or 0) / 1e6
    return Proposal(
        cause=statement,
        evidence=[
            *excess_evidence(excess, CONTENTION),
            *blamed,
            evidence(f"a step with prompt tokens beside decodes takes {mixed_ms:,.0f} ms (p95), one with decodes only "
                     f"{plain_ms:,.0f} ms (p50)", mixed_ms, "ms", "steps: begin_ns, end_ns, kinds"),
            *residual_evidence(facts),
        ],
        measurement="the same scenario with a smaller token budget",
        settings={"max_num_batched_tokens": value},
        if_cause=f"mixed steps fall from {mixed_ms:,.0f} to about {target_ms:,.0f} ms; the longest "
        f"prompt, {longest:,.0f} tokens, then takes about {longest_s:.1f} s",
        if_rival=f"steps stay long beside decodes alone, and {missing_share(excess)} stays",
        change=f"max_num_batched_tokens={value}" + (f" (now {budget})" if budget else "")
        + ", or send long prompts to a server of their own",
        claims=all_of(INTERFERENCE, removed),
        fixes=(Change(settings={"max_num_batched_tokens": value}),),
    )  # fmt: skip


@cause(lifecycles=("request",), object="arrivals", kind="workload", accounts=CONTENTION,
       needs=("excess", "load"), rival="lost capacity: a server that is slower than it was")  # fmt: skip
def burst(facts: Facts, excess: Excess) -> Proposal | None:
    """The mean load is moderate, and arrivals come so close together that their backlog alone breaks the objective."""
    now, arrivals = load(facts), facts.arrivals
    if arrivals is None or not arrivals.varied or now >= FULL:
        return None
    capacity = facts.offered_rps / best_load(facts)
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
                     in_burst, "share", "client: due_ns; steps: fit of wall time"),
            *excess_evidence(excess, CONTENTION),
            load_evidence(f"the mean load is {now:.2f} of the capacity", now),
        ],
        measurement=f"as many requests at a constant {facts.offered_rps:.1f} requests/s",
        settings=None,
        if_cause=f"{missing_share(excess)} falls to none or few",
        if_rival=f"load / capacity exceeds {now:.2f}, and requests outside of {peaks} are late too",
        change=f"capacity for the peak instead of the mean{spread}",
        fixes=(Change(arrivals="even"),),
    )  # fmt: skip


@cause(lifecycles=("request", "compute"), object=OFFERED_LOAD, kind="capacity", accounts=CONTENTION,
       needs=("load",), rival="a fault that slows every step")  # fmt: skip
def overload(facts: Facts, excess: Excess | None) -> Proposal | None:
    """More arrives than the device can serve, whatever the policy. Also without an excess, where requests fail."""
    now, best = load(facts), best_load(facts)
    if best < FULL:
        return None
    capacity, batch = facts.offered_rps / best, batch_within_tpot(facts)
    limit = "meets every objective on the time per output token" if batch < LARGEST_BATCH else "the model reaches"
    admit = COMFORTABLE * capacity
    return Proposal(
        cause=f"{facts.offered_rps:.1f} requests/s arrive, and the device serves at most {capacity:.1f} of this "
        "length: no policy will help",
        evidence=[
            load_evidence(f"load / capacity is {now:.2f} with these settings, and {best:.2f} at the best batch of "
                          f"{batch:.0f} that {limit}", best),
            *excess_evidence(excess, CONTENTION),
            *_growth(facts),
            *residual_evidence(facts),
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
