"""Causes in the host's part of a step: what it does beside the device, and what the device waits for."""

from sojourn.diagnosis.capacity import FULL, best_load, load
from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts
from sojourn.diagnosis.rules.cause import CONTENTION, EXPLAINS_ENOUGH, Proposal, cause
from sojourn.diagnosis.rules.shared_evidence import excess_evidence
from sojourn.diagnosis.step_facts import DEVICE_STAGES
from sojourn.diagnosis.symptoms import LOW_DEVICE_BUSY
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.prediction import Change

SMALL_BATCH = 4  # below it the fixed cost of a step weighs on each of its requests
HOST, DECODE = "compute.host", "compute.decode"
LAUNCHED = "steps: stage_launch_ns, device_ns, graph, request_ids"
MOSTLY = 0.5
WAITS_FOR_LAUNCHES = 0.8  # launching / device time: a device that is the slower one lets the host run ahead
IN_A_GRAPH = 2.0  # a launch takes the host some 4 µs, and the next kernel of a graph starts after less than 2
SLOW_STAGE = 3.0  # times its normal cost: a busy machine and short steps double it
# Where no reference tells it: the loop's Python code takes so many milliseconds a step, and a sequence, on a slow core.
USUAL_STEP_MS, USUAL_SEQUENCE_MS = 2.0, 0.1
WORTH_MENDING = 0.1  # of the steps' time


@cause(lifecycles=("compute",), object="host side of the loop", kind="fault", needs=("steps",),
       rival="small batches: the device has too little to do in a step", symptom="low_device_utilisation")  # fmt: skip
def slow_host(facts: Facts, excess: Excess | None) -> Proposal | None:
    """The loop keeps the device waiting between its steps."""
    steps, host_share = facts.steps, facts.steps.host_share
    host = {name: part for name, part in steps.stage_share.items() if name not in DEVICE_STAGES}
    speed = facts.speed()
    paces = speed.host if speed is not None else {}
    queued = 0.0 if facts.machine is None else min(0.9, facts.machine.core_queued or 0.0)
    slow = {name: pace for name, pace in paces.items() if pace.slowdown * (1 - queued) >= SLOW_STAGE}
    wasted = sum(pace.took_ms - pace.normal_ms for pace in slow.values()) / (steps.wall_ns / 1e6)
    host_ms = host_share * steps.wall_ns / steps.count / 1e6
    usual_ms = USUAL_STEP_MS + USUAL_SEQUENCE_MS * steps.mean_batch
    lost = min(1.0, wasted / max(host_share, 1e-9)) if paces else max(0.0, 1 - usual_ms / max(host_ms, 1e-9))
    if excess is not None and (excess.objective == "served" or host_share * lost < WORTH_MENDING):
        return None
    fills = load(facts) >= FULL > best_load(facts) if facts.work is not None else False
    idle = facts.device_busy is not None and facts.device_busy < LOW_DEVICE_BUSY and host_share > 1 - LOW_DEVICE_BUSY
    if excess is None and not idle:
        return None
    claims = {HOST: lost} | dict.fromkeys(CONTENTION, host_share * lost)
    if excess is not None and excess.share(HOST) * lost < 0.1 and not fills and host_share < EXPLAINS_ENOUGH:
        return None
    stage = max(slow, key=lambda name: slow[name].took_ms) if slow else max(host, key=lambda name: host[name])
    busy, small = facts.device_busy or 0.0, steps.mean_batch < SMALL_BATCH
    fixed_cost = ": small batches share the fixed cost among few" if small else ", so the fixed cost is already shared"
    return Proposal(
        cause=f"the host spends {host_ms:.1f} ms of every step outside the device, most of it in `{stage}`",
        evidence=[
            *excess_evidence(excess, (HOST,)),
            evidence(f"host stages take {host_share:.0%} of the steps' wall time; `{stage}` alone {host[stage]:.0%}",
                     host_share, "share", "steps: stage_*_ns", weight=2),
            *([evidence(f"`{stage}` takes {paces[stage].slowdown:.1f} times its normal time", paces[stage].slowdown,
                        "ratio", "steps: stage_*_ns; run.json: speed_reference",
                        supports=paces[stage].slowdown >= SLOW_STAGE, weight=2)] if stage in paces else []),
            evidence(f"the device works {busy:.0%} of the time in which a request is in the server",
                     busy, "share", "steps: device_ns; requests: arrived_ns, finished_ns",
                     supports=busy < LOW_DEVICE_BUSY, weight=0.5),
            evidence(f"steps hold {steps.mean_batch:.1f} requests on average{fixed_cost}",
                     steps.mean_batch, "requests", "steps: request_ids", supports=small, weight=0.5),
            *_neighbour(facts),
        ],
        measurement=f"the stage `{stage}` under a profiler, or the same load with half the requests in flight",
        settings={"max_num_seqs": max(1, int(steps.mean_batch / 2))},
        if_cause=f"host time stays near {host_ms:.1f} ms a step whatever the batch",
        if_rival="host time stays below a tenth of the step, and device time a step falls with the batch",
        change=f"shorten `{stage}`, or overlap it with the device's work",
        claims=claims,
        fixes=(Change(removed={HOST: lost}),),
    )  # fmt: skip


@cause(lifecycles=("compute",), object="launches of kernels", kind="policy", needs=("excess", "steps"),
       accounts=(DECODE,), rival="a slow device: it would be slow in steps with prompts, too",
       rival_key="slow_device")  # fmt: skip
def launch_bound(facts: Facts, excess: Excess) -> Proposal | None:
    """The device waits for the host to launch each kernel of a decode step, because no graph is replayed."""
    found, speed = facts.launches, facts.speed()
    if found is None or found.eager_share < MOSTLY or found.launch_share < WAITS_FOR_LAUNCHES:
        return None
    known = [each for each in (speed.others if speed is not None else []) if "graphs" in each.settings]
    factor = known[0].speedup if known else IN_A_GRAPH
    if factor < 1 + WORTH_MENDING:
        return None
    lost = found.eager_share * (1 - 1 / factor)
    is_off = facts.engine.get("graphs") == "off"
    return Proposal(
        cause=f"decode steps are launched kernel by kernel, and the device waits for it: {found.step_ms:.1f} ms a step"
        + (", as graphs are off" if is_off else ", as no graph fits them"),
        evidence=[
            evidence(f"the host launches for {found.launch_share:.0%} of the device's time in these steps: no kernel "
                     "is ready before the one before it ends", found.launch_share, "ratio", LAUNCHED, weight=3),
            evidence(f"{found.eager_share:.0%} of the device time of decode steps is in steps that replay no graph",
                     found.eager_share, "share", "steps: graph, device_ns", weight=1),
            evidence(f"{found.fixed_share:.0%} of such a step does not grow with its sequences", found.fixed_share,
                     "share", LAUNCHED, supports=found.fixed_share >= MOSTLY, weight=1),
            *([evidence(f"with graphs the same steps take {1 / factor:.0%} of the time", factor, "ratio",
                        "run.json: speed_reference", weight=2)] if known else []),
            *excess_evidence(excess, (DECODE,)),
        ],
        measurement="the same scenario with graphs, or `POST /debug/profile`: gaps between the kernels of a step",
        settings={"graphs": "on"},
        if_cause=f"decode steps take about {found.step_ms / factor:.1f} ms",
        if_rival=f"decode steps take {found.step_ms:.1f} ms with graphs, too",
        change="graphs=on (with graphs=auto, the log says why they could not be captured)",
        claims={DECODE: lost} | dict.fromkeys(CONTENTION, lost),
        fixes=(Change(settings={"graphs": "on"}, device_speed=1 / max(1 - lost, 0.1)),),
    )  # fmt: skip


def _neighbour(facts: Facts) -> list[Evidence]:
    machine = facts.machine
    if machine is None or machine.core_queued is None or machine.core_queued < 0.3:
        return []
    queued = machine.core_queued
    statement = f"the engine's threads wait for a core in {queued:.0%} of the time: a neighbour slows the host as well"
    return [evidence(statement, queued, "share", "system: core_queued_ns", supports=False)]
