"""Causes in the lifecycle of a request: admission, queue, the company in a step, and the arrivals themselves."""

import math

from metrics.diagnosis.capacity import (
    COMFORTABLE,
    FULL,
    LARGEST_BATCH,
    batch_for,
    batch_within_tpot,
    best_load,
    kv_batch,
    load,
)
from metrics.diagnosis.evidence import Facts, tightest
from metrics.diagnosis.excess import Excess
from metrics.diagnosis.rules.blamed import blamed_group, long_prompt_share
from metrics.diagnosis.rules.candidate import (
    CONTENTION,
    EXPLAINS_ENOUGH,
    Candidate,
    basis,
    evidence,
    excess_evidence,
    gain,
    missing_share,
    rerun,
)
from metrics.diagnosis.rules.compute import SLOW_DEVICE
from metrics.diagnosis.verdict import Evidence, Fix, Probe

OFFERED_LOAD = "offered load"  # the object of the one cause that no policy can mend
QUEUE = ("request.queue", "request.admission")
INTERFERENCE = "request.interference"
LONG_PROMPT = 4.0  # times the median prompt of the late requests: it fills steps that they would share
BLAMED = 0.5  # of all delay by prompts: who causes more than half of it is the offender
SMALLEST_BUDGET = 32  # below it a step's fixed cost outweighs the tokens it carries on any device
WORTH_RAISING = 0.8  # a larger batch must lower load / capacity by a fifth, or the cap is not what limits


def overload(facts: Facts, excess: Excess | None) -> Candidate | None:
    """More arrives than the device can serve, whatever the policy."""
    best = best_load(facts)
    if math.isnan(best) or best < FULL or (excess is not None and excess.share(*CONTENTION) < EXPLAINS_ENOUGH):
        return None
    now, capacity = load(facts), facts.offered_rps / best
    batch = batch_within_tpot(facts)
    keeps = "keeps every objective on the time per output token" if batch < LARGEST_BATCH else "the model reaches"
    return Candidate(
        key="overload",
        lifecycles=["request", "compute"],
        object=OFFERED_LOAD,
        cause=f"{facts.offered_rps:.1f} requests/s arrive, and the device serves at most {capacity:.1f} of this "
        "length: no policy will help",
        kind="capacity",
        evidence=[
            evidence(f"load / capacity is {now:.2f} with these settings, and {best:.2f} at the best batch of "
                     f"{batch:.0f} that {keeps}", best, "ratio", "steps: fit of wall time; client: due_ns"),
            *excess_evidence(excess, CONTENTION),
            *_growth(facts),
            *_residual(facts),
        ],
        probe=Probe(
            measurement=f"the same scenario at {COMFORTABLE * capacity:.1f} requests/s",
            command="",
            rival="a fault that slows every step",
            if_cause=f"step times stay as they are, and {missing_share(excess)} falls to none or few",
            if_rival="steps of the same composition still take as long, and the time per output token stays high",
        ),
        fix=Fix(change=f"{facts.offered_rps / (COMFORTABLE * capacity):.1f} times the devices, or admit at most "
                f"{COMFORTABLE * capacity:.1f} requests/s and answer 429 to the rest",
                gain=f"load / capacity {best:.2f} → {COMFORTABLE:.2f}",
                basis="step times fitted to this run; good to about 10 %"),
    )  # fmt: skip


def batch_cap(facts: Facts, excess: Excess | None) -> Candidate | None:
    """Requests wait for a place in the batch while the device could take more of them in a step."""
    steps = facts.steps
    if steps is None or excess is None:
        return None
    capped = facts.waits.get("batch_cap", 0.0)
    if capped * excess.share(*QUEUE) < EXPLAINS_ENOUGH:
        return None
    roomy = min(batch_within_tpot(facts), kv_batch(facts)) if steps.model and facts.work else math.nan
    now, raised = load(facts), load(facts, batch=roomy) if not math.isnan(roomy) else math.nan
    if math.isnan(raised) or raised >= FULL or raised > WORTH_RAISING * now:
        return None
    cap = facts.engine.get("max_num_seqs") or round(steps.mean_batch)
    value = max(int(min(batch_for(facts), roomy)), 2 * cap)
    gained = gain(facts, QUEUE)
    return Candidate(
        gain=gained,
        key="batch_cap",
        lifecycles=["request", "compute"],
        object="batch cap (max_num_seqs)",
        cause=f"the batch is capped at {cap} requests, while the device and the KV pool could take {roomy:.0f}",
        kind="policy",
        evidence=[
            *excess_evidence(excess, QUEUE),
            *blamed_group(facts, excess),
            evidence(f"{capped:.0%} of the waiting was for the batch cap: refused by it, or behind a request that was",
                     capped, "share", "requests: waits; steps: refusals"),
            evidence(f"at least a fifth of the KV pool was free in {steps.waited_with_kv_free:.0%} of that waiting",
                     steps.waited_with_kv_free, "share", "steps: waiting, blocks_free, blocks_reusable",
                     supports=steps.waited_with_kv_free > 0.5),
            evidence(f"load / capacity is {now:.2f} with this cap and {raised:.2f} without", now, "ratio",
                     "steps: fit of wall time; client: due_ns"),
        ],
        probe=Probe(
            measurement="the same scenario with a larger batch",
            command=rerun(facts, max_num_seqs=value),
            rival="overload: the device is full at any batch",
            if_cause=f"load / capacity falls from {now:.2f} to about {load(facts, batch=value):.2f}, {gained}",
            if_rival=f"{missing_share(excess)} stays, and the time per output token grows with the batch",
        ),
        fix=Fix(change=f"max_num_seqs={value}", gain=str(gained), basis=basis(QUEUE)),
    )  # fmt: skip


def long_prompts(facts: Facts, excess: Excess | None) -> Candidate | None:
    """Steps filled by others' long prompts make everybody in them wait."""
    if excess is None or facts.steps is None or excess.share(*CONTENTION) < EXPLAINS_ENOUGH:
        return None
    prompts = facts.rows.set_index("request_id").server_prompt_tokens.astype("float64")
    typical = float(prompts.loc[facts.rows.request_id[excess.missing]].median())
    share, offenders = long_prompt_share(facts, excess, LONG_PROMPT * typical)
    if share < BLAMED or not len(offenders):
        return None
    classes = ", ".join(sorted(set(offenders.klass.dropna()) - {""}))
    who = f"{len(offenders)} requests{f' of {classes}' if classes else ''} with "
    who += f"{offenders.prompt_tokens.median():,.0f} prompt tokens"
    blamed = evidence(f"{share:.0%} of what others cost those that miss it is caused by {who}; their own have "
                      f"{typical:,.0f}", share, "share", "steps: new_tokens, kinds, request_ids; requests")  # fmt: skip
    return _smaller_chunks(facts, excess, "long_prompts", f"{who} fill whole steps, and everybody in them waits",
                           [blamed])  # fmt: skip


def prompt_interference(facts: Facts, excess: Excess | None) -> Candidate | None:
    """Prompt chunks of ordinary length that make a mixed step longer than the objective."""
    if excess is None or facts.steps is None or excess.share(INTERFERENCE) < EXPLAINS_ENOUGH:
        return None
    bound, mixed_ns = tightest(facts, "tpot_ms"), facts.steps.prefill_step_p95_ns
    if bound is None or mixed_ns is None or mixed_ns / 1e6 <= bound:
        return None
    return _smaller_chunks(
        facts, excess, "prompt_interference", "others' prompt chunks make the steps longer than the objective", []
    )


def _smaller_chunks(facts: Facts, excess: Excess, key: str, cause: str, more: list[Evidence]) -> Candidate | None:
    """One remedy for both: a budget with which a mixed step keeps the time per output token."""
    steps, bound = facts.steps, tightest(facts, "tpot_ms")
    if steps.model is None or steps.prefill_tokens_p95 is None:
        return None
    mixed_ms, budget = steps.prefill_step_p95_ns / 1e6, facts.engine.get("max_num_batched_tokens")
    target_ms = bound if bound is not None else mixed_ms / 2
    context = steps.mean_batch * (facts.work.context_tokens if facts.work else 0)
    room = (target_ms * 1e6 - steps.model.predict(0, context)) / max(steps.model.token_ns, 1)
    value = max(SMALLEST_BUDGET, int(room) // SMALLEST_BUDGET * SMALLEST_BUDGET)
    removed = max(0.0, 1 - value / steps.prefill_tokens_p95)
    if removed <= 0 or (budget is not None and value >= budget):
        return None
    longest = float(facts.rows.server_prompt_tokens.astype("float64").max())
    longest_s = longest / value * target_ms / 1e3
    gained = gain(facts, (INTERFERENCE,), removed)
    plain_ms = (steps.decode_step_p50_ns or 0) / 1e6
    return Candidate(
        gain=gained,
        key=key,
        lifecycles=["request", "compute"],
        object="token budget of a step",
        cause=cause,
        kind="policy",
        evidence=[
            *excess_evidence(excess, CONTENTION),
            *more,
            evidence(f"a step with prompt tokens beside decodes takes {mixed_ms:,.0f} ms (p95), one with decodes only "
                     f"{plain_ms:,.0f} ms (p50)", mixed_ms, "ms", "steps: begin_ns, end_ns, kinds"),
            *_residual(facts),
        ],
        probe=Probe(
            measurement="the same scenario with a smaller token budget",
            command=rerun(facts, max_num_batched_tokens=value),
            rival="a slow device: steps that are long for what they hold",
            if_cause=f"mixed steps fall from {mixed_ms:,.0f} to about {target_ms:,.0f} ms, {gained}; the longest "
            f"prompt, {longest:,.0f} tokens, then takes about {longest_s:.1f} s",
            if_rival=f"steps stay long beside decodes alone, and {missing_share(excess)} stays",
        ),
        fix=Fix(change=f"max_num_batched_tokens={value}"
                + (f" (now {budget})" if budget else "") + ", or send long prompts to a server of their own",
                gain=str(gained), basis=basis((INTERFERENCE,), removed)),
    )  # fmt: skip


def burst(facts: Facts, excess: Excess | None) -> Candidate | None:
    """The mean load is moderate, and arrivals come so close together that their backlog alone breaks the objective."""
    now, arrivals = load(facts), facts.arrivals
    if excess is None or arrivals is None or not arrivals.varied or math.isnan(now) or now >= FULL:
        return None
    if excess.share(*CONTENTION) < EXPLAINS_ENOUGH:
        return None
    capacity = facts.offered_rps / best_load(facts)
    in_burst, peak = _in_backlog(facts, excess, capacity)
    if in_burst < 0.5:  # most of the late ones came when nothing was piled up
        return None
    gained = gain(facts, CONTENTION)
    if arrivals.bursty:
        how, peaks = f"arrivals come in bursts (coefficient of variation {arrivals.cv:.1f})", "bursts"
        spread = ", or a limit for each client that spreads its bursts"
    else:
        rates = f"up to {arrivals.peak_rps:.1f} requests/s, {facts.offered_rps:.1f} on average"
        how, peaks, spread = f"the rate of arrivals changes ({rates})", "the peak", ""
    return Candidate(
        gain=gained,
        key="burst",
        lifecycles=["request"],
        object="arrivals",
        cause=f"{how}; at a load of {now:.2f} of the capacity their backlog alone breaks the objective",
        kind="workload",
        evidence=[
            evidence(f"the gaps between arrivals vary with a coefficient of {arrivals.cv:.1f}, neighbours with "
                     f"{arrivals.local_cv:.1f}; independent arrivals have 1.0",
                     arrivals.cv, "ratio", "client: due_ns"),
            evidence(f"{in_burst:.0%} of the late requests came into a backlog that a server of {capacity:.1f} "
                     f"requests/s needs more than half of the objective to clear; the largest took {peak:.1f} s",
                     in_burst, "share", "client: due_ns; steps: fit of wall time"),
            *excess_evidence(excess, CONTENTION),
            evidence(f"the mean load is {now:.2f} of the capacity", now, "ratio",
                     "steps: fit of wall time; client: due_ns"),
        ],
        probe=Probe(
            measurement=f"as many requests at a constant {facts.offered_rps:.1f} requests/s",
            command="",
            rival="lost capacity: a server that is slower than it was",
            if_cause=f"{missing_share(excess)} falls to none or few",
            if_rival=f"load / capacity exceeds {now:.2f}, and requests outside of {peaks} are late too",
        ),
        fix=Fix(change=f"capacity for the peak instead of the mean{spread}", gain=str(gained),
                basis=basis(CONTENTION)),
    )  # fmt: skip


def token_budget(facts: Facts, excess: Excess | None) -> Candidate | None:
    """Prompts wait for a token budget so small that every step's fixed cost is paid for few tokens."""
    steps = facts.steps
    if steps is None or steps.model is None or excess is None:
        return None
    short = facts.waits.get("token_budget", 0.0)
    budget, bound = facts.engine.get("max_num_batched_tokens"), tightest(facts, "tpot_ms")
    if not budget or short * excess.share(*CONTENTION) < EXPLAINS_ENOUGH:
        return None
    if steps.model.step_ns < steps.model.token_ns * budget:  # a full step already pays mostly for its tokens
        return None
    room = (bound * 1e6 - steps.model.step_ns) / max(steps.model.token_ns, 1) if bound else 8 * budget
    value = int(min(8 * budget, room)) // SMALLEST_BUDGET * SMALLEST_BUDGET
    if value < 2 * budget:
        return None
    gained = gain(facts, CONTENTION)
    return Candidate(
        gain=gained,
        key="token_budget",
        lifecycles=["request", "compute"],
        object="token budget of a step",
        cause=f"a step may hold {budget} tokens, and its fixed cost of {steps.model.step_ns / 1e6:.1f} ms outweighs "
        "them",
        kind="policy",
        evidence=[
            *excess_evidence(excess, CONTENTION),
            evidence(f"{short:.0%} of the waiting was refused by the token budget", short, "share",
                     "requests: waits; steps: refusals"),
            evidence(f"steps were {steps.budget_use:.0%} full while somebody waited", steps.budget_use, "share",
                     "steps: new_tokens, budget, waiting", supports=steps.budget_use > 0.8),
        ],
        probe=Probe(
            measurement="the same scenario with a larger token budget",
            command=rerun(facts, max_num_batched_tokens=value),
            rival="overload",
            if_cause=f"prompt tokens a second rise by about "
            f"{_prompt_rate(facts, value) / _prompt_rate(facts, budget):.1f} times",
            if_rival=f"{missing_share(excess)} stays",
        ),
        fix=Fix(change=f"max_num_batched_tokens={value}", gain=str(gained), basis=basis(CONTENTION)),
    )  # fmt: skip


def _prompt_rate(facts: Facts, budget: int) -> float:
    return budget / facts.steps.model.predict(budget, budget)


def _in_backlog(facts: Facts, excess: Excess, capacity_rps: float) -> tuple[float, float]:
    """Share of the late requests that met a backlog of half their objective, and the largest backlog in seconds.

    The backlog is that of a fluid queue with one server of `capacity_rps`, fed with the recorded arrivals. A request
    is also in a backlog that builds within its bound after it: those behind it share its steps.
    """
    bound_s = (tightest(facts, "ttft_ms") or excess.bound_ms) / 1e3
    due_s = facts.rows.due_ns.to_numpy(dtype="float64") / 1e9
    backlog, level = [], 0.0
    for index, when in enumerate(due_s):
        level = max(0.0, level - (when - due_s[index - 1] if index else 0.0)) + 1 / capacity_rps
        backlog.append(level)
    late = [facts.rows.index.get_loc(label) for label in excess.missing]
    met = 0
    for place in late:
        last = place
        while last + 1 < len(due_s) and due_s[last + 1] <= due_s[place] + bound_s:
            last += 1
        met += max(backlog[place : last + 1]) >= bound_s / 2
    return (met / len(late) if late else 0.0), max(backlog, default=0.0)


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


def _residual(facts: Facts) -> list[Evidence]:
    slowdown = facts.steps.slowdown if facts.steps else None
    if slowdown is None:
        return []
    at_fault = slowdown >= SLOW_DEVICE
    return [
        evidence(f"steps take {slowdown:.2f} times what their composition explains: the device "
                 f"{'may be' if at_fault else 'is not'} at fault", slowdown, "ratio",
                 "steps: device_ns, predicted_ns", supports=not at_fault)
    ]  # fmt: skip
