"""How slow the steps of a run are, and who else had the cores."""

from sojourn.diagnosis.evidence import Client, Records
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.compute.speed_facts import SpeedFacts

WORTH_MENDING = 0.1  # of the steps' time
HEADROOM = 1.25  # above the speed at which the mean request is just in time
DEVICE_ACCOUNTS = ("compute.decode", "compute.prefill", "request.interference", "memory.recompute")
# Waits that steps make longer. A request in the socket waits for the front, whatever the device does.
WAITS = ("request.queue", "memory.blocked")
HELD = 0.1  # of the time that the core's threads could compute: less is within the usual spread of a step
NEIGHBOUR_CORES = 0.4  # that other processes have meanwhile: less is an operating system at work
WITH_CONTEXT = 1.2  # slowdown with much context over that with little: a healthy device has 0.9 to 1.06
FASTER_SETTINGS = 1.15  # below it two calibrations of one setting may differ as much
PER_STEP = "steps: device_ns, sampling_ns; run.json: speed_reference"
SAMPLED = "system: core_queued_ns, host_cpu_percent, core_cpu_seconds, front_cpu_seconds"


def slowness(facts: Records) -> tuple[float, float]:
    """Device time / normal time, without waits for a core: over the whole run, and over its worst quarter."""
    speed, machine = facts.speed(), facts.machine
    waits = (0.0, 0.0)
    if machine is not None:
        waits = machine.bound_delay(machine.core_queued), machine.bound_delay(machine.core_queued_worst)
    whole = worst = 1.0
    if speed is not None:
        whole, worst = speed.device.slowdown, max(speed.quarters)
    if (speed is None or speed.source != "reference") and facts.steps is not None and facts.steps.slowdown is not None:
        whole = max(whole, facts.steps.slowdown)
        worst = max(worst, facts.steps.worst_slowdown or 1.0)
    return whole * (1 - waits[0]), worst * (1 - waits[1])


def claim_slowness(facts: Records, factor: float) -> dict[str, float]:
    """Claims of device time that is `factor` times the normal one: of each phase as far as it is slow, and of waits."""
    lost, speed = 1 - 1 / max(factor, 1.0), facts.speed()
    if speed is None:
        return all_of((*DEVICE_ACCOUNTS, *WAITS), lost)
    phases = {}
    for pace, accounts in ((speed.prompts, DEVICE_ACCOUNTS[1:]), (speed.decodes, DEVICE_ACCOUNTS[:1])):
        part = 1.0 if pace is None else min(1.0, pace.lost_share / max(speed.device.lost_share, 1e-9))
        phases |= dict.fromkeys(accounts, min(1.0, lost * part))
    return phases | dict.fromkeys(WAITS, lost)


def neighbour_evidence(facts: Client, *, supports: bool) -> list[Evidence]:
    machine = facts.machine
    if machine is None or machine.core_queued is None:
        return []
    others = machine.core_queued_by_others_worst or 0.0
    is_queued = others >= HELD and (machine.others_cores_worst or 0.0) >= NEIGHBOUR_CORES
    statement = f"the engine's threads wait for a core in {machine.core_queued:.0%} of the steps' time"
    statement += ": another process has it" if is_queued else ": the cores are its own"
    return [evidence(statement, machine.core_queued, "share", SAMPLED, supports=is_queued == supports)]


def growth_with_context(speed: SpeedFacts | None) -> float:
    """Slowdown of decode steps with much context over that with little; 1 where it is not known."""
    known = speed is not None and speed.source == "reference" and speed.decodes is not None
    return speed.with_context or 1.0 if known else 1.0
