"""The core computes with fewer threads than there are cores, and cores are idle."""

from sojourn.diagnosis.cause import Cause, Change, Client, Evidence, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.statements.device import DEVICE_ACCOUNTS, FASTER_SETTINGS, PER_STEP, SAMPLED, WAITS
from sojourn.diagnosis.statements.excess import SLOW_DEVICE, excess_evidence
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME, Reading
from sojourn.metrics.compute.machine_facts import MachineFacts
from sojourn.metrics.compute.speed_facts import SpeedFacts
from sojourn.metrics.run.directory import server_hardware

IDLE_CORES = 0.5  # on average: threads that another process would take from are no gain


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    core = facts.meta.get("core") or {}
    threads, cores = core.get("threads") or 0, server_hardware(facts.meta).get("cores") or 0
    if core.get("device") != "cpu" or not 0 < threads < cores or "threads" not in facts.chosen:
        return None  # the default leaves a core for the front
    speed = facts.speed()
    known = [each for each in (speed.others if speed else []) if (each.settings.get("threads") or 0) > threads]
    rest, idle = _used_beside(facts.machine, cores)
    # Without a calibration: a third of the ideal, as memory bounds decode steps
    factor = known[0].speedup if known else 1 + (cores / threads - 1) / 3
    # A step ends with its last thread, and the added ones share their cores with all that runs beside the core process
    factor *= max(0.0, 1 - rest / (cores - threads))
    if factor < FASTER_SETTINGS or (not known and idle < IDLE_CORES):
        return None
    return Proposal(
        cause=f"the core computes with {threads} of {cores} cores",
        evidence=[
            evidence(f"the same steps take {1 / factor:.0%} of the time with {known[0].settings['threads']} threads "
                     "beside all that runs"
                     if known else f"{threads} threads are set, and the machine has {cores} cores",
                     factor if known else threads, "ratio" if known else "threads",
                     "run.json: speed_reference, core, hardware", weight=2 if known else 1),
            evidence(f"{max(idle, 0):.1f} cores are idle on average", idle, "cores", SAMPLED,
                     supports=idle >= IDLE_CORES),
            *_pace_evidence(speed),
            *excess_evidence(excess, (*DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement="the same scenario with one thread for each core",
        settings={"threads": cores},
        if_cause=f"device time falls to about {1 / factor:.0%}",
        if_rival="device time stays",
        claims=all_of((*DEVICE_ACCOUNTS, *WAITS), 1 - 1 / factor),
        fixes=(Change(settings={"threads": cores}, device_speed=factor),),
    )  # fmt: skip


def _pace_evidence(speed: SpeedFacts | None) -> list[Evidence]:
    """Against the cause: steps at normal speed."""
    if speed is None or speed.source != "reference" or speed.device.slowdown >= SLOW_DEVICE:
        return []
    pace = speed.device.slowdown
    return [evidence(f"steps take {pace:.2f} times what is normal with that number of threads", pace, "ratio", PER_STEP,
                     supports=False, weight=2)]  # fmt: skip


def _used_beside(machine: MachineFacts | None, cores: int) -> tuple[float, float]:
    """Cores that run something beside the core process, and cores that are idle, on average."""
    if machine is None:
        return 0.0, 0.0
    rest = sum(each or 0.0 for each in (machine.front_cores, machine.load_cores, machine.others_cores))
    return rest, 0.0 if machine.core_cores is None else cores - machine.core_cores - rest


def show_threads(facts: Client) -> Reading | None:
    used, cores = facts.engine.get("threads"), server_hardware(facts.meta).get("cores")
    if not isinstance(used, int) or not isinstance(cores, int):
        return None
    return Reading(f"{used} of {cores} cores compute", used >= cores, "run.json: threads, hardware", 1 - used / cores)


CAUSE = Cause(
    key="few_threads",
    lifecycles=("compute",),
    object="threads of the core",
    kind="policy",
    rival="a slow device: more threads would not help it",
    rival_key="slow_device",
    asks="Are cores left unused?",
    measurement="the same scenario with threads equal to the cores",
    figures=(show_threads,),
    booked=DEVICE_TIME,
    missing="the threads and the cores, in run.json",
    complaints={"high_ttft": 9, "high_itl": 11, "low_device_utilisation": 3, "devices_do_not_help": 4},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
