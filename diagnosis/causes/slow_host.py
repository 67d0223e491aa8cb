"""The loop keeps the device waiting between its steps."""

from sojourn.diagnosis.capacity import FULL, best_load, load
from sojourn.diagnosis.cause import (
    Accounts,
    Cause,
    Change,
    Client,
    Evidence,
    Excess,
    Means,
    Proposal,
    Records,
    Rule,
    evidence,
)
from sojourn.diagnosis.excess import SERVED
from sojourn.diagnosis.proposal import CONTENTION, EXPLAINS_ENOUGH, Gain
from sojourn.diagnosis.statements import sensors
from sojourn.diagnosis.statements.accounts import hold_time
from sojourn.diagnosis.statements.device import WORTH_MENDING
from sojourn.diagnosis.statements.excess import excess_evidence
from sojourn.diagnosis.step_facts import DEVICE_STAGES
from sojourn.diagnosis.symptom_tree.reading import NEGLIGIBLE, Reading
from sojourn.diagnosis.symptoms import LOW_DEVICE_BUSY
from sojourn.metrics.compute.speed_facts import Pace

HOST = "compute.host"
LAUNCHES = "launches of kernels: they are the host's work, too, and graphs spare them"
SMALL_BATCH = 4  # below it the fixed cost of a step weighs on each of its requests
SLOW_STAGE = 3.0  # times its normal cost: a busy machine and short steps double it
# Where no reference tells it: the loop's Python code takes so many milliseconds a step, and a sequence, on a slow core.
USUAL_STEP_MS, USUAL_SEQUENCE_MS = 2.0, 0.1


def read_records(facts: Records, excess: Excess | None) -> Proposal | None:
    steps, host_share = facts.steps, facts.steps.host_share
    host = {name: part for name, part in steps.stage_share.items() if name not in DEVICE_STAGES}
    paces, slow = _stage_paces(facts)
    wasted = sum(pace.took_ms - pace.normal_ms for pace in slow.values()) / (steps.wall_ns / 1e6)
    host_ms = host_share * steps.wall_ns / steps.count / 1e6
    usual_ms = USUAL_STEP_MS + USUAL_SEQUENCE_MS * steps.mean_batch
    lost = min(1.0, wasted / max(host_share, 1e-9)) if paces else max(0.0, 1 - usual_ms / max(host_ms, 1e-9))
    if not _is_worth_mending(facts, excess, host_share, lost):
        return None
    claims = {HOST: lost} | dict.fromkeys(CONTENTION, host_share * lost)
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


def read_sensors(facts: Means | Client, excess: Excess) -> Proposal | None:
    """The device that works most idles while requests are in flight."""
    device = sensors.held_up(facts, "host")
    if device is None or device.used is None or excess.objective == SERVED:
        return None
    lost, cpu = 1 - device.used, sensors.cpu_problem(facts.sensors) if facts.sensors is not None else None
    return Proposal(
        cause=f"{device.device} works {device.used:.0%} of the time in which requests are in flight: the host holds it "
        "up",
        evidence=[
            evidence(f"{sensors.figures(device)}, over {device.readings} readings with requests in flight",
                     device.used, "share", f"{sensors.SOURCE}: engine_activity, gpu_utilisation", weight=2),
            *([evidence(cpu[0], cpu[1], "share", f"{sensors.SOURCE}: cpu_steal, cpu_clock")] if cpu else []),
            *sensors.whose_devices(facts),
        ],
        measurement="a profile of the engine's process (py-spy) beside this load, and the same load without "
        "--enforce-eager or with graphs",
        settings={},
        if_cause="the profile names the scheduler, the tokeniser or the front, and graphs change little",
        if_rival="the profile is full of launches, and graphs raise the device's use",
        change="a faster or less shared CPU, graphs, asynchronous scheduling, fewer processes of the front per core",
        explained=sensors.part_lost(facts, excess, lost),
        gain=Gain(f"at most {lost:.0%} of the time of its steps", basis="the device's idle time with requests in it"),
    )  # fmt: skip


def _stage_paces(facts: Records) -> tuple[dict[str, Pace], dict[str, Pace]]:
    """The host's stages whose normal speed is known, and those of them that are slow on cores of their own."""
    speed = facts.speed()
    paces = speed.host if speed is not None else {}
    queued = 0.0 if facts.machine is None else min(0.9, facts.machine.core_queued or 0.0)
    return paces, {name: pace for name, pace in paces.items() if pace.slowdown * (1 - queued) >= SLOW_STAGE}


def _is_worth_mending(facts: Records, excess: Excess | None, host_share: float, lost: float) -> bool:
    """`lost`: of the host's time, what a sound host would not take."""
    if excess is None:  # no request is late: whether the device idles
        busy = facts.device_busy
        return busy is not None and busy < LOW_DEVICE_BUSY and host_share > 1 - LOW_DEVICE_BUSY
    if excess.objective == "served" or host_share * lost < WORTH_MENDING:
        return False
    fills = load(facts) >= FULL > best_load(facts) if facts.work is not None else False
    return fills or excess.share(HOST) * lost >= 0.1 or host_share >= EXPLAINS_ENOUGH


def _neighbour(facts: Client) -> list[Evidence]:
    machine = facts.machine
    if machine is None or machine.core_queued is None or machine.core_queued < 0.3:
        return []
    queued = machine.core_queued
    statement = f"the engine's threads wait for a core in {queued:.0%} of the time: a neighbour slows the host as well"
    return [evidence(statement, queued, "share", "system: core_queued_ns", supports=False)]


def show_host_time(facts: Records) -> Reading | None:
    if facts.steps is None:
        return None
    share = facts.steps.host_share
    return Reading(
        f"the host keeps the device waiting for {share:.0%} of the time of steps",
        share < NEGLIGIBLE,
        "steps: stage_*_ns, device_ns",
        share,
    )


CAUSE = Cause(
    key="slow_host",
    lifecycles=("compute",),
    object="host side of the loop",
    kind="fault",
    rival="small batches: the device has too little to do in a step",
    asks="Does the host keep the device waiting?",
    measurement="a profile of the loop: py-spy on the core process",
    figures=(show_host_time,),
    complaints={"high_ttft": 4, "high_itl": 6, "low_device_utilisation": 1, "devices_do_not_help": 1},
    reads={
        Records: Rule(read_records, needs=("steps",), symptom="low_device_utilisation"),
        Means: Rule(read_sensors, rival=LAUNCHES, rival_key="launch_bound", refuted_by=(sensors.BUSY_DEVICE,)),
        Client: Rule(read_sensors, rival=LAUNCHES, rival_key="launch_bound"),
        Accounts: hold_time(
            accounts=("compute.host",),
            words="the loop keeps the device waiting between its steps",
            change="find what the loop does between the steps",
            rival="small batches",
        ),
    },
)
