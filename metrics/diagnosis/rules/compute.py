"""Causes in the lifecycle of compute, and in the front process that no device time can hide."""

from metrics.diagnosis.capacity import FULL, best_load, load
from metrics.diagnosis.excess import Excess
from metrics.diagnosis.facts import Facts
from metrics.diagnosis.rules.cause import CONTENTION, EXPLAINS_ENOUGH, WAITS, Proposal, all_of, cause
from metrics.diagnosis.rules.shared_evidence import SLOW_DEVICE, excess_evidence
from metrics.diagnosis.step_facts import DEVICE_STAGES
from metrics.diagnosis.symptoms import LOW_DEVICE_BUSY
from metrics.diagnosis.verdict import Evidence, evidence
from metrics.replay.prediction import Change

SMALL_BATCH = 4  # below it the fixed cost of a step weighs on each of its requests
FRONT = ("request.stream", "token.decode", "token.encode")
# Account → lifecycles, object, what the client waits for, and what relieves it.
FRONT_OBJECTS = {
    "request.stream": (
        ("request",), "front process", "text is ready and waits to be written",
        "fewer, larger chunks, another front process, or a faster reader",
    ),
    "token.decode": (
        ("token", "request"), "detokeniser", "ids are ready and wait to become text",
        "larger chunks, or another front process",
    ),
    "token.encode": (
        ("token", "request"), "tokeniser", "prompts wait to be parsed, templated and encoded",
        "shorter templates, a faster tokeniser, or another front process",
    ),
}  # fmt: skip
DEVICE_ACCOUNTS = ("compute.decode", "compute.prefill", "request.interference", "memory.recompute")
NETWORK, DECODE, PREFILL = ("client.network",), ("compute.decode",), ("compute.prefill",)


@cause(lifecycles=("compute",), object="device", kind="fault", needs=("excess", "steps"),
       rival="large batches: steps that are slow because they hold much")  # fmt: skip
def slow_device(facts: Facts, excess: Excess) -> Proposal | None:
    """The device takes longer than the composition of its steps explains."""
    steps = facts.steps
    if steps.worst_slowdown is None or steps.worst_slowdown < SLOW_DEVICE:
        return None
    removed = 1 - 1 / max(steps.slowdown, 1.0)
    # A queue is the device's doing only if the lost speed alone fills the server
    fills = removed > EXPLAINS_ENOUGH and load(facts) >= FULL > load(facts) * (1 - removed)
    accounts = (*DEVICE_ACCOUNTS, *WAITS) if fills else DEVICE_ACCOUNTS
    if excess.share(*accounts) < EXPLAINS_ENOUGH:
        return None
    times, part = (steps.slowdown, "") if steps.slowdown >= SLOW_DEVICE else (steps.worst_slowdown, " for a while")
    return Proposal(
        cause=f"the device takes {times:.1f} times as long as the composition of its steps explains{part}",
        evidence=[
            evidence(f"device time is {steps.slowdown:.2f} times the predicted time, {steps.worst_slowdown:.2f} times "
                     "over the worst quarter of the run", steps.slowdown, "ratio", "steps: device_ns, predicted_ns"),
            evidence(f"the prediction covers {steps.predicted_share:.0%} of the device time",
                     steps.predicted_share, "share", "steps: predicted_ns", supports=steps.predicted_share >= 0.5),
            *_residual_by_phase(facts),
            *excess_evidence(excess, accounts),
        ],
        measurement="the same scenario on a quiet machine, with the device's clock and its other processes in view",
        settings={},
        if_cause=f"device / predicted time falls from {times:.1f} to about 1.0",
        if_rival=f"device / predicted time stays near {times:.1f}, and grows with the tokens of a step",
        change="find what slows the device: a lowered clock, a neighbour process, a slow kernel",
        claims=all_of(accounts, removed),
        fixes=(Change(device_speed=max(1.0, steps.slowdown)),),
    )  # fmt: skip


@cause(lifecycles=("compute",), object="host side of the loop", kind="fault", needs=("steps",),
       rival="small batches: the device has too little to do in a step", symptom="low_device_utilisation")  # fmt: skip
def slow_host(facts: Facts, excess: Excess | None) -> Proposal | None:
    """The loop keeps the device waiting between its steps."""
    steps, host_share = facts.steps, facts.steps.host_share
    host = {name: part for name, part in steps.stage_share.items() if name not in DEVICE_STAGES}
    accounts = ("compute.host", *CONTENTION) if load(facts) >= FULL > best_load(facts) else ("compute.host",)
    # A queue is the host's doing only if it fills the server alone, and spends much of the time
    explained = excess.share(*accounts) if excess and (len(accounts) == 1 or host_share > EXPLAINS_ENOUGH) else 0.0
    idle = facts.device_busy is not None and facts.device_busy < LOW_DEVICE_BUSY and host_share > 1 - LOW_DEVICE_BUSY
    if explained < EXPLAINS_ENOUGH and not (excess is None and idle):
        return None
    stage = max(host, key=lambda name: host[name])
    host_ms = host_share * steps.wall_ns / steps.count / 1e6
    busy, small = facts.device_busy or 0.0, steps.mean_batch < SMALL_BATCH
    fixed_cost = ": small batches share the fixed cost among few" if small else ", so the fixed cost is already shared"
    return Proposal(
        cause=f"the host spends {host_ms:.1f} ms of every step outside the device, most of it in `{stage}`",
        evidence=[
            *excess_evidence(excess, accounts),
            evidence(f"host stages take {host_share:.0%} of the steps' wall time; `{stage}` alone {host[stage]:.0%}",
                     host_share, "share", "steps: stage_*_ns"),
            evidence(f"the device works {busy:.0%} of the time in which a request is in the server",
                     busy, "share", "steps: device_ns; requests: arrived_ns, finished_ns",
                     supports=busy < LOW_DEVICE_BUSY),
            evidence(f"steps hold {steps.mean_batch:.1f} requests on average{fixed_cost}",
                     steps.mean_batch, "requests", "steps: request_ids", supports=small),
        ],
        measurement=f"the stage `{stage}` under a profiler, or the same load with half the requests in flight",
        settings={"max_num_seqs": max(1, int(steps.mean_batch / 2))},
        if_cause=f"host time stays near {host_ms:.1f} ms a step whatever the batch",
        if_rival="host time stays below a tenth of the step, and device time a step falls with the batch",
        change=f"shorten `{stage}`, or overlap it with the device's work",
        claims=all_of(accounts),
        fixes=(Change(removed={"compute.host": 1.0}),),
    )  # fmt: skip


@cause(lifecycles=("request",), object="front process", kind="fault", accounts=FRONT,
       rival="one slow thing, not a busy process: a slow reader, or a huge prompt")  # fmt: skip
def slow_front(facts: Facts, excess: Excess) -> Proposal:
    """Text is ready, and waits for the front process to decode or write it; or prompts wait to be encoded."""
    account = max(FRONT, key=excess.share)
    lifecycles, thing, waits_for, relief = FRONT_OBJECTS[account]
    waits = facts.steps.waiting_share if facts.steps else 0.0
    return Proposal(
        lifecycles=lifecycles,
        object=thing,
        cause=f"the {thing} does not keep up: {waits_for}",
        evidence=[
            *excess_evidence(excess, FRONT),
            evidence(f"requests wait for a place in the batch in {waits:.0%} of the steps' time", waits, "share",
                     "steps: waiting", supports=waits < 0.5),
        ],
        measurement="one request at a time, so that the front serves nobody else",
        settings={"max_num_seqs": 1},
        if_cause=f"{account} falls for every request as the front has less to do",
        if_rival=f"{account} stays on the few requests that it belongs to, and is near 0 on all others",
        change=f"relieve the {thing}: {relief}",
        fixes=(Change(removed=all_of(FRONT)),),
    )  # fmt: skip


@cause(lifecycles=("client",), object="network path between client and server", kind="client",
       accounts=NETWORK, rival="a load generator that reads late")  # fmt: skip
def slow_network(facts: Facts, excess: Excess) -> Proposal:
    """The time is lost between client and server."""
    return Proposal(
        cause="requests or chunks are in transit between client and server, or wait to be read by the client",
        evidence=excess_evidence(excess, NETWORK),
        measurement="the same load from the server's own host",
        settings={},
        if_cause="client.network falls to below a millisecond",
        if_rival="client.network stays, and falls with fewer streams for each load process",
        change="shorten the network path, or give the load generator another process",
        fixes=(Change(removed=all_of(NETWORK)),),
    )


def _residual_by_phase(facts: Facts) -> list[Evidence]:
    """Which phase is slow separates two faults: arithmetic bounds steps with prompts, memory bounds the others."""
    prompts, decodes = facts.steps.slowdown_with_prompts, facts.steps.slowdown_without
    if prompts is None or decodes is None:
        return []
    if abs(prompts - decodes) < 0.1 * max(prompts, decodes):
        which = "both alike: the whole device, or a process that shares it"
    elif prompts > decodes:
        which = "arithmetic more than memory, as a lowered clock does"
    else:
        which = "memory more than arithmetic, as a neighbour on the same memory does"
    return [
        evidence(f"steps with prompts take {prompts:.2f} times what was expected, steps without {decodes:.2f} times: "
                 f"{which}", prompts / decodes, "ratio", "steps: device_ns, predicted_ns, kinds")
    ]  # fmt: skip
