"""Causes in the lifecycle of compute, and in the front process that no device time can hide."""

from metrics.diagnosis.capacity import FULL, batch_within_tpot, best_load, load
from metrics.diagnosis.evidence import Facts, tightest
from metrics.diagnosis.excess import Excess
from metrics.diagnosis.rules.candidate import (
    CONTENTION,
    EXPLAINS_ENOUGH,
    WAITS,
    Candidate,
    basis,
    evidence,
    excess_evidence,
    gain,
    missing_share,
    rerun,
)
from metrics.diagnosis.step_facts import DEVICE_STAGES
from metrics.diagnosis.verdict import Evidence, Fix, Probe

# Device time above what the composition of the steps explains. The step model is good to about 10 %, a shared machine
# jitters as much again; a third more over a quarter of the run is neither.
SLOW_DEVICE = 1.3
LOW_DEVICE_BUSY = 0.6  # below it a device idles for two thirds of the time it works: a host or front problem
FRONT = ("request.stream", "token.decode", "token.encode")
# Account → lifecycle, object, what the client waits for, and what relieves it.
FRONT_OBJECTS = {
    "request.stream": (
        "request", "front process", "text is ready and waits to be written",
        "fewer, larger chunks, another front process, or a faster reader",
    ),
    "token.decode": (
        "token", "detokeniser", "ids are ready and wait to become text", "larger chunks, or another front process",
    ),
    "token.encode": (
        "token", "tokeniser", "prompts wait to be parsed, templated and encoded",
        "shorter templates, a faster tokeniser, or another front process",
    ),
}  # fmt: skip
DEVICE_ACCOUNTS = ("compute.decode", "compute.prefill", "request.interference", "memory.recompute")


def slow_device(facts: Facts, excess: Excess | None) -> Candidate | None:
    """The device takes longer than the composition of its steps explains."""
    steps = facts.steps
    if excess is None or steps is None or steps.worst_slowdown is None or steps.worst_slowdown < SLOW_DEVICE:
        return None
    removed = 1 - 1 / max(steps.slowdown, 1.0)
    # A queue is the device's doing only if the lost speed alone fills the server
    fills = removed > EXPLAINS_ENOUGH and load(facts) >= FULL > load(facts) * (1 - removed)
    accounts = (*DEVICE_ACCOUNTS, *WAITS) if fills else DEVICE_ACCOUNTS
    if excess.share(*accounts) < EXPLAINS_ENOUGH:
        return None
    gained = gain(facts, accounts, removed)
    times, part = (steps.slowdown, "") if steps.slowdown >= SLOW_DEVICE else (steps.worst_slowdown, " for a while")
    return Candidate(
        gain=gained,
        key="slow_device",
        lifecycles=["compute"],
        object="device",
        cause=f"the device takes {times:.1f} times as long as the composition of its steps explains{part}",
        kind="fault",
        evidence=[
            evidence(f"device time is {steps.slowdown:.2f} times the predicted time, {steps.worst_slowdown:.2f} times "
                     "over the worst quarter of the run", steps.slowdown, "ratio", "steps: device_ns, predicted_ns"),
            evidence(f"the prediction covers {steps.predicted_share:.0%} of the device time",
                     steps.predicted_share, "share", "steps: predicted_ns", supports=steps.predicted_share >= 0.5),
            *_residual_by_phase(facts),
            *excess_evidence(excess, accounts),
        ],
        probe=Probe(
            measurement="the same scenario on a quiet machine, with the device's clock and its other processes in view",
            command=rerun(facts),
            rival="large batches: steps that are slow because they hold much",
            if_cause=f"device / predicted time falls from {times:.1f} to about 1.0",
            if_rival=f"device / predicted time stays near {times:.1f}, and grows with the tokens of a step",
        ),
        fix=Fix(change="find what slows the device: a lowered clock, a neighbour process, a slow kernel",
                gain=str(gained), basis=basis(accounts, removed)),
    )  # fmt: skip


def slow_host(facts: Facts, excess: Excess | None) -> Candidate | None:
    """The loop keeps the device waiting between its steps."""
    steps = facts.steps
    if steps is None:
        return None
    host = {name: part for name, part in steps.stage_share.items() if name not in DEVICE_STAGES}
    host_share = steps.host_share
    accounts = ("compute.host", *CONTENTION) if load(facts) >= FULL > best_load(facts) else ("compute.host",)
    # A queue is the host's doing only if it fills the server alone, and spends much of the time
    explained = excess.share(*accounts) if excess and (len(accounts) == 1 or host_share > EXPLAINS_ENOUGH) else 0.0
    idle = facts.device_busy is not None and facts.device_busy < LOW_DEVICE_BUSY and host_share > 1 - LOW_DEVICE_BUSY
    if explained < EXPLAINS_ENOUGH and not (excess is None and idle):
        return None
    stage = max(host, key=lambda name: host[name])
    host_ms = host_share * steps.wall_ns / steps.count / 1e6
    gained = gain(facts, accounts)
    busy = facts.device_busy if facts.device_busy is not None else 0.0
    return Candidate(
        gain=gained,
        key="slow_host",
        lifecycles=["compute"],
        object="host side of the loop",
        cause=f"the host spends {host_ms:.1f} ms of every step outside the device, most of it in `{stage}`",
        kind="fault",
        evidence=[
            *excess_evidence(excess, accounts),
            evidence(f"host stages take {host_share:.0%} of the steps' wall time; `{stage}` alone {host[stage]:.0%}",
                     host_share, "share", "steps: stage_*_ns"),
            evidence(f"the device works {busy:.0%} of the time in which a request is in the server",
                     busy, "share", "steps: device_ns; requests: arrived_ns, finished_ns",
                     supports=busy < LOW_DEVICE_BUSY),
            evidence(f"steps hold {steps.mean_batch:.1f} requests on average: {'small' if small(facts) else 'large'} "
                     "batches share the fixed cost among few" if small(facts) else
                     f"steps hold {steps.mean_batch:.1f} requests on average, so the fixed cost is already shared",
                     steps.mean_batch, "requests", "steps: request_ids", supports=small(facts)),
        ],
        probe=Probe(
            measurement=f"the stage `{stage}` under a profiler, or the same load with half the requests in flight",
            command=rerun(facts, max_num_seqs=max(1, int(steps.mean_batch / 2))),
            rival="small batches: the device has too little to do in a step",
            if_cause=f"host time stays near {host_ms:.1f} ms a step whatever the batch",
            if_rival="host time stays below a tenth of the step, and device time a step falls with the batch",
        ),
        fix=Fix(change=f"shorten `{stage}`, or overlap it with the device's work", gain=str(gained),
                basis=basis(accounts)),
    )  # fmt: skip


def small(facts: Facts) -> bool:
    """Whether steps hold so few requests that their fixed cost weighs on each: fewer than four."""
    return facts.steps is not None and facts.steps.mean_batch < 4


def slow_front(facts: Facts, excess: Excess | None) -> Candidate | None:
    """Text is ready, and waits for the front process to decode or write it; or prompts wait to be encoded."""
    if excess is None or excess.share(*FRONT) < EXPLAINS_ENOUGH:
        return None
    account = max(FRONT, key=excess.share)
    lifecycle, thing, waits_for, relief = FRONT_OBJECTS[account]
    gained = gain(facts, FRONT)
    waits = facts.steps.waiting_share if facts.steps else 0.0
    return Candidate(
        gain=gained,
        key="slow_front",
        lifecycles=[lifecycle, "request"] if lifecycle != "request" else ["request"],
        object=thing,
        cause=f"the {thing} does not keep up: {waits_for}",
        kind="fault",
        evidence=[
            *excess_evidence(excess, FRONT),
            evidence(f"requests wait for a place in the batch in {waits:.0%} of the steps' time", waits, "share",
                     "steps: waiting", supports=waits < 0.5),
        ],
        probe=Probe(
            measurement="one request at a time, so that the front serves nobody else",
            command=rerun(facts, max_num_seqs=1),
            rival="one slow thing, not a busy process: a slow reader, or a huge prompt",
            if_cause=f"{account} falls for every request as the front has less to do",
            if_rival=f"{account} stays on the few requests that it belongs to, and is near 0 on all others",
        ),
        fix=Fix(change=f"relieve the {thing}: {relief}",
                gain=str(gained), basis=basis(FRONT)),
    )  # fmt: skip


def slow_network(facts: Facts, excess: Excess | None) -> Candidate | None:
    """The time is lost between client and server."""
    if excess is None or excess.share("client.network") < EXPLAINS_ENOUGH:
        return None
    gained = gain(facts, ("client.network",))
    return Candidate(
        gain=gained,
        key="slow_network",
        lifecycles=["client"],
        object="way between client and server",
        cause="requests or chunks are under way between client and server, or wait to be read by the client",
        kind="client",
        evidence=excess_evidence(excess, ("client.network",)),
        probe=Probe(
            measurement="the same load from the server's own host",
            command=rerun(facts),
            rival="a load generator that reads late",
            if_cause="client.network falls to below a millisecond",
            if_rival="client.network stays, and falls with fewer streams for each load process",
        ),
        fix=Fix(change="shorten the way, or give the load generator another process", gain=str(gained),
                basis=basis(("client.network",))),
    )  # fmt: skip


def slow_decode(facts: Facts, excess: Excess | None) -> Candidate | None:
    """A step of the normal length is longer than the objective: by its batch, or even alone."""
    bound = tightest(facts, "tpot_ms")
    if excess is None or excess.share("compute.decode") < EXPLAINS_ENOUGH or excess.objective == "ttft_ms":
        return None
    if facts.steps is None or facts.steps.model is None or facts.work is None or bound is None:
        return None
    model, context = facts.steps.model, facts.work.context_tokens
    alone_ms = model.predict(1, context) / 1e6
    batch = facts.steps.mean_batch
    now_ms = model.predict(batch, batch * context) / 1e6
    fits = int(batch_within_tpot(facts))
    too_slow = alone_ms > bound
    removed = max(0.0, 1 - bound / now_ms)
    gained = gain(facts, ("compute.decode",), removed)
    feasible = not too_slow and load(facts, batch=fits) < 1
    return Candidate(
        gain=gained,
        key="slow_decode",
        lifecycles=["compute"],
        object="decode step",
        cause=f"a decode step takes {alone_ms:.1f} ms for a single request, above the objective of {bound:g} ms"
        if too_slow else
        f"a decode step of {batch:.0f} requests takes {now_ms:.1f} ms; {fits} would keep the {bound:g} ms",
        kind="policy" if feasible else "capacity",
        evidence=[
            *excess_evidence(excess, ("compute.decode",)),
            evidence(f"step model: {model.step_ns / 1e6:.2f} ms + {model.token_ns / 1e3:.1f} µs a token + "
                     f"{model.context_ns:.0f} ns a token of context", model.step_ns / 1e6, "ms", "steps: fit"),
        ],
        probe=Probe(
            measurement="the same scenario with a smaller batch",
            command=rerun(facts, max_num_seqs=max(1, fits)),
            rival="a fault of the device",
            if_cause=f"decode steps fall to about {model.predict(fits, fits * context) / 1e6:.1f} ms",
            if_rival=f"decode steps stay near {now_ms:.1f} ms",
        ),
        fix=Fix(change=f"max_num_seqs={max(1, fits)}" if feasible else
                "a faster device, a smaller model or lower precision; or an objective that this device can keep",
                gain=str(gained), basis=basis(("compute.decode",), removed)),
    )  # fmt: skip


def own_prefill(facts: Facts, excess: Excess | None) -> Candidate | None:
    """The request's own prompt takes longer than the objective allows."""
    if excess is None or excess.share("compute.prefill") < EXPLAINS_ENOUGH or facts.work is None:
        return None
    late = facts.rows.loc[excess.missing]
    prompt = float(late.server_prompt_tokens.astype("float64").median())
    gained = gain(facts, ("compute.prefill",))
    own_ms = float((late.ttft_compute_prefill_ns.astype("float64") / 1e6).mean())
    return Candidate(
        gain=gained,
        key="own_prefill",
        lifecycles=["compute", "token"],
        object="prompt",
        cause=f"a prompt of {prompt:,.0f} tokens costs {own_ms:,.0f} ms of its own, with nobody in its way",
        kind="capacity",
        evidence=excess_evidence(excess, ("compute.prefill",)),
        probe=Probe(
            measurement="one of the late requests alone on an idle server",
            command=rerun(facts, max_num_seqs=1),
            rival="other requests' prompts in the same steps",
            if_cause=f"its own prefill stays near {own_ms:,.0f} ms",
            if_rival=f"{missing_share(excess)} falls to none",
        ),
        fix=Fix(change="a faster prefill, a shared prefix, or an objective that grows with the prompt",
                gain=str(gained), basis=basis(("compute.prefill",))),
    )  # fmt: skip


def _residual_by_phase(facts: Facts) -> list[Evidence]:
    """Arithmetic bounds steps with prompts, memory those without: which is slow tells one from the other."""
    prompts, decodes = facts.steps.slowdown_with_prompts, facts.steps.slowdown_without
    if prompts is None or decodes is None:
        return []
    if abs(prompts - decodes) < 0.1 * max(prompts, decodes):
        which = "both alike: the whole device, or who shares it"
    else:
        which = "arithmetic more than memory, as a lowered clock does" if prompts > decodes else (
            "memory more than arithmetic, as a neighbour on the same memory does"
        )  # fmt: skip
    return [
        evidence(f"steps with prompts take {prompts:.2f} times what was expected, steps without {decodes:.2f} times: "
                 f"{which}", prompts / decodes, "ratio", "steps: device_ns, predicted_ns, kinds")
    ]  # fmt: skip
