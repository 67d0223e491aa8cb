"""Threads of the server are ready and wait, because other processes have the cores."""

from sojourn.diagnosis.cause import (
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
from sojourn.diagnosis.proposal import Gain
from sojourn.diagnosis.statements import device, sensors
from sojourn.diagnosis.statements.excess import SLOW_DEVICE, excess_evidence, missing_share
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME, NEGLIGIBLE, Reading
from sojourn.metrics.compute.machine_facts import MachineFacts

SAMPLE = "token.sample"
FASTER = 0.7  # of the normal time: no device is that much faster than itself


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    machine = facts.machine
    if machine is None or machine.core_queued_by_others is None:
        return None
    held, worst = machine.core_queued_by_others, machine.core_queued_by_others_worst or 0.0
    taken = machine.others_cores_worst or 0.0
    if max(held, worst) < device.HELD or taken < device.NEIGHBOUR_CORES:
        return None
    most = machine.bound_delay(max(held, worst))
    speed, loop = facts.speed(), machine.front
    if speed is not None and speed.source == "reference":  # what it costs cannot be more than what is lost
        most = min(most, 1 - 1 / max(speed.device.slowdown, *speed.quarters, 1.0))
    claims = dict.fromkeys((*device.DEVICE_ACCOUNTS, *device.WAITS, "compute.host", SAMPLE), most)
    front = min(0.9, (loop.queued_by_others or 0.0)) if loop is not None else 0.0
    claims |= dict.fromkeys(("request.stream", "token.encode", "token.decode"), front)
    if max(most, front) < device.HELD:
        return None
    own = 0.0 if loop is None else loop.long_share * (1 - (loop.queued or 0.0))  # a neighbour holds no event loop
    foreign = max(0.0, taken - machine.siblings_cores)  # the fleet's other servers are of this run
    whose = (
        f", {machine.siblings_cores:.1f} of them the fleet's other servers," if machine.siblings_cores >= 0.1 else ""
    )
    return Proposal(
        cause=f"other processes take {machine.others_cores:.1f} of {machine.cores} cores{whose or ','} and threads of "
        f"the engine wait for them in {held:.0%} of their time",
        evidence=[
            evidence(f"the engine's threads stand in the run queue in {machine.core_queued:.0%} of the steps' time; "
                     f"in {held:.0%} because of other processes, {worst:.0%} in the worst quarter of the run", worst,
                     "share", device.SAMPLED, weight=2),
            evidence(f"processes that are not of this run take "
                     f"{max(0.0, machine.others_cores - machine.siblings_cores):.2f} cores, {foreign:.2f} in the worst "
                     "quarter", foreign, "cores", device.SAMPLED, supports=foreign >= device.NEIGHBOUR_CORES),
            *_named_evidence(machine),
            *_own_pace_evidence(facts),
            *([evidence(f"the front's event loop is held in turns of up to {loop.longest_ms:,.0f} ms, "
                        f"{own:.0%} of the time without its waits for a core: no neighbour does that", own, "share",
                        "system: loop_turn_ns", supports=False, weight=3)]
              if own >= 0.1 else []),
            *excess_evidence(excess, tuple(claims)),
        ],
        measurement="the same scenario while nothing else runs on these cores",
        settings={},
        if_cause=f"time in the run queue falls from {machine.core_queued:.0%} to a few percent",
        if_rival="the run queue is empty, and the steps take as long",
        change="give the server cores of its own: end the other process, pin it elsewhere (taskset, cpusets), or raise "
        "the server's priority",
        claims=claims,
        fixes=(Change(device_speed=1 / (1 - most), removed={"compute.host": most}),),
    )  # fmt: skip


def read_sensors(facts: Means | Client, excess: Excess) -> Proposal | None:
    """The hypervisor gives the host's CPUs to other machines."""
    seen = facts.sensors
    stolen = seen.cpu.mean("cpu_steal") or 0.0 if seen is not None and seen.cpu is not None else 0.0
    found = sensors.cpu_problem(seen) if seen is not None and stolen >= sensors.STOLEN else None
    if found is None:
        return None
    return Proposal(
        cause=found[0],
        evidence=[evidence(f"{stolen:.0%} of the CPUs' time is stolen, over {seen.cpu.readings} readings", stolen,
                           "share", f"{sensors.SOURCE}: cpu_steal", weight=2)],
        measurement="the same load on a machine of its own, or at another hour, with `--sensors host`",
        settings={},
        if_cause=f"nothing is stolen there, and {missing_share(excess)} falls",
        if_rival=f"nothing is stolen there, and {missing_share(excess)} stays",
        change="a machine with cores of its own",
        explained=sensors.part_lost(facts, excess, stolen),
        gain=Gain(f"at least {stolen:.0%} of the time of its CPUs", basis="the slowest thread waits longest"),
    )  # fmt: skip


def _named_evidence(machine: MachineFacts) -> list[Evidence]:
    """The other processes by name: a fact of no weight that tells where to look."""
    shown = [f"{name} {cores:.2f}" for name, cores in machine.neighbours.items()]
    most = max(machine.neighbours.values(), default=0.0)
    return [evidence(f"the busiest of them, in cores: {', '.join(shown)}", most, "cores", "system: neighbours",
                     weight=0)] if shown else []  # fmt: skip


def _own_pace_evidence(facts: Records) -> list[Evidence]:
    """For a neighbour: whether steps are at normal speed as soon as they have their cores."""
    whole, worst = device.slowness(facts)
    if facts.speed() is None or whole < FASTER:  # then the waits are overestimated, and say nothing of the pace
        return []
    statement = f"without their waits for a core, steps take {whole:.2f} times the normal time"
    return [evidence(statement, whole, "ratio", device.PER_STEP, supports=max(whole, worst) < SLOW_DEVICE)]


def show_neighbours(facts: Client) -> Reading | None:
    """Whether the engine waited for cores that other processes had."""
    machine = facts.machine
    if machine is None or machine.core_queued is None:
        return show_steal(facts)
    worst = machine.core_queued_worst or machine.core_queued
    others = "" if machine.others_cores is None else f", and other processes used {machine.others_cores:.1f} cores"
    return Reading(
        f"the engine waited for a core in {worst:.0%} of its time in the worst quarter{others}",
        worst < NEGLIGIBLE,
        "system: core_queued_ns, *_cpu_seconds",
        min(1.0, worst),
    )


def show_steal(facts: Client) -> Reading | None:
    if facts.steal is None:
        return None
    share = facts.steal.mean / 100
    return Reading(
        f"the hypervisor gave {share:.0%} of the CPU time to other machines", False, "system: host_steal_percent", share
    )


CAUSE = Cause(
    key="noisy_neighbour",
    lifecycles=("compute",),
    object="cores of the machine",
    kind="fault",
    rival="a slow device: it would be slow on a free core, too",
    rival_key="slow_device",
    name="other processes of the machine",
    asks="Does another process use the device?",
    measurement="the CPU time of other processes during the run",
    figures=(show_neighbours,),
    booked=DEVICE_TIME,
    missing="the CPU use of other processes (system)",
    complaints={"high_ttft": 3, "high_itl": 5},
    reads={
        Records: Rule(read_records),
        Means: Rule(read_sensors, refuted_by=(sensors.NOTHING_STOLEN,)),
        Client: Rule(read_sensors),
    },
)
