"""Causes of slow steps: the device, a neighbour on its cores, its kernels, its threads, and the draws."""

from collections.abc import Mapping
from typing import Any

from sojourn.diagnosis.excess import Excess
from sojourn.diagnosis.facts import Facts, declared_classes
from sojourn.diagnosis.machine_facts import MachineFacts
from sojourn.diagnosis.rules.cause import Proposal, all_of, cause
from sojourn.diagnosis.rules.shared_evidence import SLOW_DEVICE, excess_evidence, missing_share
from sojourn.diagnosis.verdict import Evidence, evidence
from sojourn.metrics.compute.speed_facts import SpeedFacts
from sojourn.metrics.prediction import Change
from sojourn.metrics.run.directory import server_hardware

DEVICE_ACCOUNTS = ("compute.decode", "compute.prefill", "request.interference", "memory.recompute")
# Waits that steps make longer. A request in the socket waits for the front, whatever the device does.
WAITS = ("request.queue", "memory.blocked")
CONTENTION = (*WAITS, "request.interference")
SAMPLE = "token.sample"
HELD = 0.1  # of the time that the core's threads could compute: less is within the usual spread of a step
NEIGHBOUR_CORES = 0.4  # that other processes have meanwhile: less is an operating system at work
WITH_CONTEXT = 1.2  # slowdown with much context over that with little: a healthy device has 0.9 to 1.06
FASTER_SETTINGS = 1.15  # below it two calibrations of one setting may differ as much
SLOW_DRAWS = 1.8  # draws cost more with penalties and truncation, but seldom twice as much
SAMPLES_MUCH = 0.1  # of a step
SAMPLES_MOST = 0.3  # ... beyond which no model samples, as far as no reference says what is normal
IDLE_CORES = 0.5  # on average: threads that another process would take from are no gain
PER_STEP = "steps: device_ns, sampling_ns; run.json: speed_reference"
SAMPLED = "system: core_queued_ns, host_cpu_percent, core_cpu_seconds, front_cpu_seconds"
# Parameters of a request that make its draws dearer.
DEAR = ("logprobs", "top_logprobs", "prompt_logprobs", "repetition_penalty", "frequency_penalty", "presence_penalty",
        "lz_penalty", "logit_bias", "bad_words", "regex", "structured_outputs", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "response_format", "min_p", "top_p")  # fmt: skip
WITHOUT_EFFECT_AT_ONE = ("repetition_penalty", "top_p")  # the others are without effect where they are null, 0 or empty


def slowness(facts: Facts) -> tuple[float, float]:
    """Device time / normal time, without waits for a core: over the whole run, and over its worst quarter."""
    speed, machine = facts.speed(), facts.machine
    waits = (0.0, 0.0)
    if machine is not None:
        waits = machine.delayed(machine.core_queued), machine.delayed(machine.core_queued_worst)
    whole = worst = 1.0
    if speed is not None:
        whole, worst = speed.device.slowdown, max(speed.quarters)
    if (speed is None or speed.source != "reference") and facts.steps is not None and facts.steps.slowdown is not None:
        whole = max(whole, facts.steps.slowdown)
        worst = max(worst, facts.steps.worst_slowdown or 1.0)
    return whole * (1 - waits[0]), worst * (1 - waits[1])


def slowed(facts: Facts, factor: float) -> dict[str, float]:
    """Claims of device time that is `factor` times the normal one: of each phase as far as it is slow, and of waits."""
    lost, speed = 1 - 1 / max(factor, 1.0), facts.speed()
    if speed is None:
        return all_of((*DEVICE_ACCOUNTS, *WAITS), lost)
    phases = {}
    for pace, accounts in ((speed.prompts, DEVICE_ACCOUNTS[1:]), (speed.decodes, DEVICE_ACCOUNTS[:1])):
        part = 1.0 if pace is None else min(1.0, pace.lost_share / max(speed.device.lost_share, 1e-9))
        phases |= dict.fromkeys(accounts, min(1.0, lost * part))
    return phases | dict.fromkeys(WAITS, lost)


@cause(lifecycles=("compute",), object="device", kind="fault", needs=("excess", "steps"),
       rival="large batches: steps that are slow because they hold much", rival_key="batch_too_large")  # fmt: skip
def slow_device(facts: Facts, excess: Excess) -> Proposal | None:
    """The device takes longer than at its normal speed, all the time or for a while."""
    whole, worst = slowness(facts)
    speed = facts.speed()
    usual = 1.0 if speed is None else min(speed.quarters)
    for_a_while = usual < SLOW_DEVICE and worst >= SLOW_DEVICE * max(1.0, usual)  # the rest of the run is not slow
    always = whole >= SLOW_DEVICE and not for_a_while
    if not (always or for_a_while) or excess.share(*DEVICE_ACCOUNTS, *WAITS) <= 0:
        return None
    times, part = (whole, "") if always else (worst, " for a while")
    grows = _grows(speed)
    return Proposal(
        cause=f"the device takes {times:.1f} times as long as normal for the same steps{part}",
        evidence=[
            *_pace_evidence(facts, whole, worst),
            *_phase_evidence(facts, speed),
            *_neighbour_evidence(facts, supports=False),
            *([evidence(f"the slowdown grows with the context, {grows:.1f} times: a kernel of attention, not the whole "
                        "device", grows, "ratio", PER_STEP, supports=False, weight=3)]
              if grows >= WITH_CONTEXT else []),
            *excess_evidence(excess, (*DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement="the same scenario on a quiet machine, with the device's clock and its other processes in view",
        settings={},
        if_cause=f"device time / normal time falls from {times:.1f} to about 1.0",
        if_rival=f"device time / normal time stays near {times:.1f}, and falls with smaller batches",
        change="find what slows the device: a lowered clock, a neighbour process, a slow kernel",
        claims=slowed(facts, times),
        fixes=(Change(device_speed=max(times, 1.01)),),  # the steps that are at normal speed now are in time anyway
        steps=speed.worst_steps if speed is not None and not always else None,
    )  # fmt: skip


@cause(lifecycles=("compute",), object="cores of the machine", kind="fault",
       rival="a slow device: it would be slow on a free core, too", rival_key="slow_device")  # fmt: skip
def noisy_neighbour(facts: Facts, excess: Excess) -> Proposal | None:
    """Threads of the server are ready and wait, because other processes have the cores."""
    machine = facts.machine
    if machine is None or machine.core_queued_by_others is None:
        return None
    held, worst = machine.core_queued_by_others, machine.core_queued_by_others_worst or 0.0
    taken = machine.others_cores_worst or 0.0
    if max(held, worst) < HELD or taken < NEIGHBOUR_CORES:
        return None
    most = machine.delayed(max(held, worst))
    speed, loop = facts.speed(), machine.front
    if speed is not None and speed.source == "reference":  # what it costs cannot be more than what is lost
        most = min(most, 1 - 1 / max(speed.device.slowdown, *speed.quarters, 1.0))
    claims = dict.fromkeys((*DEVICE_ACCOUNTS, *WAITS, "compute.host", SAMPLE), most)
    front = min(0.9, (loop.queued_by_others or 0.0)) if loop is not None else 0.0
    claims |= dict.fromkeys(("request.stream", "token.encode", "token.decode"), front)
    if max(most, front) < HELD:
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
                     "share", SAMPLED, weight=2),
            evidence(f"processes that are not of this run take "
                     f"{max(0.0, machine.others_cores - machine.siblings_cores):.2f} cores, {foreign:.2f} in the worst "
                     "quarter", foreign, "cores", SAMPLED, supports=foreign >= NEIGHBOUR_CORES),
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


def _named_evidence(machine: MachineFacts) -> list[Evidence]:
    """The other processes by name: a fact of no weight that tells where to look."""
    shown = [f"{name} {cores:.2f}" for name, cores in machine.neighbours.items()]
    most = max(machine.neighbours.values(), default=0.0)
    return [evidence(f"the busiest of them, in cores: {', '.join(shown)}", most, "cores", "system: neighbours",
                     weight=0)] if shown else []  # fmt: skip


@cause(lifecycles=("compute",), object="kernels", kind="fault", needs=("excess", "steps"),
       rival="a slow device: all its work would be slow", rival_key="slow_device")  # fmt: skip
def slow_kernel(facts: Facts, excess: Excess) -> Proposal | None:
    """Other kernels would compute the same faster, or one kernel is slow: the slowdown grows with its own work."""
    speed = facts.speed()
    chosen = {name: facts.engine[name] for name, usual in (("attention_backend", "auto"), ("fused_operations", "auto"))
              if facts.engine.get(name) not in (None, usual)}  # fmt: skip
    if chosen:
        return _slower_settings(excess, speed, chosen)
    grows = _grows(speed)
    if speed is None or grows < WITH_CONTEXT or speed.decodes.slowdown < SLOW_DEVICE:
        return None
    factor = speed.device.slowdown
    return Proposal(
        cause=f"attention is slow: decode steps take {speed.decodes.slowdown:.1f} times as long as normal, and the "
        "more so the more context they have",
        evidence=[
            evidence(f"with much context decode steps are slowed {grows:.1f} times as much as with little, at as many "
                     "sequences", grows, "ratio", PER_STEP, weight=3),
            *_neighbour_evidence(facts, supports=False),
            *excess_evidence(excess, (*DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement="a profile of some steps: `POST /debug/profile` names the time of each class of kernels",
        settings={},
        if_cause="attention takes the time that is lost, and the other kernels are as fast as ever",
        if_rival="all kernels are slow alike",
        change="another attention backend, or the version of the kernels that the reference was measured with",
        claims=slowed(facts, factor),
        fixes=(Change(device_speed=max(factor, 1.01)),),
    )  # fmt: skip


def _slower_settings(excess: Excess, speed: SpeedFacts | None, chosen: Mapping[str, Any]) -> Proposal | None:
    """Kernels that the run's own settings forbid."""
    faster = [each for each in (speed.others if speed else []) if set(each.settings) & set(chosen)]
    best = faster[0].speedup if faster else None
    if best is not None and best < FASTER_SETTINGS:
        return None
    settings = dict.fromkeys(chosen, "auto")
    named = ", ".join(f"{name}={value}" for name, value in chosen.items())
    known = (
        evidence(f"with {', '.join(f'{name}=auto' for name in chosen)} the same steps take {1 / best:.0%} of the time",
                 best, "ratio", PER_STEP, weight=3)
        if best is not None else
        evidence(f"{named} is set, and the fastest kernels are those of auto", 1, "setting", "run.json: engine")
    )  # fmt: skip
    factor = best if best is not None else SLOW_DEVICE
    return Proposal(
        kind="policy",
        cause=f"{named} computes with slower kernels than this device has",
        evidence=[known, *excess_evidence(excess, (*DEVICE_ACCOUNTS, *WAITS))],
        measurement="the same scenario with the fastest kernels",
        settings=settings,
        if_cause=f"device time falls to {1 / factor:.0%}",
        if_rival=f"device time stays, and so does {missing_share(excess)}",
        claims=all_of((*DEVICE_ACCOUNTS, *WAITS), 1 - 1 / factor),
        fixes=(Change(settings=settings, device_speed=factor),),
    )


@cause(lifecycles=("compute",), object="threads of the core", kind="policy", needs=("excess", "steps"),
       rival="a slow device: more threads would not help it", rival_key="slow_device")  # fmt: skip
def few_threads(facts: Facts, excess: Excess) -> Proposal | None:
    """The core computes with fewer threads than there are cores, and cores are idle."""
    core, machine = facts.meta.get("core") or {}, facts.machine
    threads, cores = core.get("threads") or 0, server_hardware(facts.meta).get("cores") or 0
    if core.get("device") != "cpu" or not 0 < threads < cores or "threads" not in facts.chosen:
        return None  # the default leaves a core for the front
    speed = facts.speed()
    at_normal_speed = speed is not None and speed.source == "reference" and speed.device.slowdown < SLOW_DEVICE
    known = [each for each in (speed.others if speed else []) if (each.settings.get("threads") or 0) > threads]
    rest = 0.0 if machine is None else sum(
        each or 0.0 for each in (machine.front_cores, machine.load_cores, machine.others_cores))  # fmt: skip
    idle = 0.0 if machine is None or machine.core_cores is None else cores - machine.core_cores - rest
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
            *([evidence(f"steps take {speed.device.slowdown:.2f} times what is normal with that number of threads",
                        speed.device.slowdown, "ratio", PER_STEP, supports=False, weight=2)]
              if at_normal_speed else []),
            *excess_evidence(excess, (*DEVICE_ACCOUNTS, *WAITS)),
        ],
        measurement="the same scenario with one thread for each core",
        settings={"threads": cores},
        if_cause=f"device time falls to about {1 / factor:.0%}",
        if_rival="device time stays",
        claims=all_of((*DEVICE_ACCOUNTS, *WAITS), 1 - 1 / factor),
        fixes=(Change(settings={"threads": cores}, device_speed=factor),),
    )  # fmt: skip


@cause(lifecycles=("token", "compute"), object="sampler", kind="fault", needs=("excess", "steps"),
       rival="a slow matrix product behind the last layer", rival_key="slow_device")  # fmt: skip
def slow_sampler(facts: Facts, excess: Excess) -> Proposal | None:
    """The draw of the next tokens takes a large part of each step."""
    speed, steps = facts.speed(), facts.steps
    share = steps.stage_share.get("sample", 0.0)
    pace = speed.sampling if speed is not None else None
    is_reference = pace is not None and speed.source == "reference"
    if share < (SAMPLES_MUCH if is_reference else SAMPLES_MOST) or (is_reference and pace.slowdown < SLOW_DRAWS):
        return None
    lost = pace.lost_share if is_reference else 1.0
    dear = dear_parameters(facts)
    each_ms = share * steps.wall_ns / steps.count / 1e6
    return Proposal(
        kind="workload" if dear and not (is_reference and pace.slowdown >= 3 * SLOW_DRAWS) else "fault",
        cause=f"sampling takes {each_ms:.1f} ms of each step, {share:.0%} of its time"
        + (f"; the requests ask for {', '.join(dear)}" if dear else ""),
        evidence=[
            evidence(f"the stage `sample` takes {share:.0%} of the steps' time", share, "share",
                     "steps: stage_sample_ns", weight=2),
            *([evidence(f"draws take {pace.slowdown:.1f} times as long as normal for as many rows", pace.slowdown,
                        "ratio", PER_STEP, supports=pace.slowdown >= SLOW_DRAWS, weight=2)] if is_reference else []),
            *excess_evidence(excess, (SAMPLE,)),
        ],
        measurement="the same scenario with greedy decoding: temperature 0, no penalties, no log-probabilities",
        settings=None,
        if_cause=f"the stage `sample` falls from {each_ms:.1f} ms a step to a fraction",
        if_rival="the stage stays, as it waits for the logits",
        change=f"leave out {', '.join(dear)}, or sample with fused kernels" if dear else
        "find what slows the sampler: its kernels, or Python code in the path of each draw",
        claims={SAMPLE: lost} | dict.fromkeys(CONTENTION, share * lost),
        fixes=(Change(removed={SAMPLE: min(1.0, lost)}),),
    )  # fmt: skip


def dear_parameters(facts: Facts) -> list[str]:
    """Parameters of the scenario's requests that make draws dearer than a plain one."""
    classes = declared_classes(facts.meta)
    asked = [*classes, *(variant for klass in classes for variant in klass.get("variants") or [])]
    bodies = [each | (each.get("extra_body") or {}) for each in asked]
    return sorted({name for body in bodies for name in DEAR
                   if body.get(name) and not (name in WITHOUT_EFFECT_AT_ONE and body[name] == 1)})  # fmt: skip


def _own_pace_evidence(facts: Facts) -> list[Evidence]:
    """For a neighbour: whether steps are at normal speed as soon as they have their cores."""
    whole, worst = slowness(facts)
    if facts.speed() is None:
        return []
    statement = f"without their waits for a core, steps take {whole:.2f} times the normal time"
    return [evidence(statement, whole, "ratio", PER_STEP, supports=max(whole, worst) < SLOW_DEVICE)]


def _pace_evidence(facts: Facts, whole: float, worst: float) -> list[Evidence]:
    speed, slow = facts.speed(), max(whole, worst)
    if speed is None:
        if facts.steps is None or facts.steps.slowdown is None:
            return []
        return [
            evidence(f"device time is {whole:.2f} times the predicted time, {worst:.2f} times over the worst quarter",
                     slow, "ratio", "steps: device_ns, predicted_ns", supports=slow >= SLOW_DEVICE, weight=1.5)
        ]  # fmt: skip
    against = "normal speed" if speed.source == "reference" else "its fastest quarter"
    return [
        evidence(f"without waits for a core, steps take {whole:.2f} times what they take at {against}, {worst:.2f} "
                 "times over the worst quarter", slow, "ratio", PER_STEP, supports=slow >= SLOW_DEVICE,
                 weight=2 if speed.source == "reference" else 1.5),
        evidence(f"the reference has {speed.entries} entries and knows {speed.covered:.0%} of the device time",
                 speed.covered, "share", PER_STEP, weight=0),
    ]  # fmt: skip


def _phase_evidence(facts: Facts, speed: SpeedFacts | None) -> list[Evidence]:
    """Which phase is slow separates faults: arithmetic bounds steps with prompts, memory bounds the others."""
    prompts, decodes = facts.steps.slowdown_with_prompts, facts.steps.slowdown_without
    if speed is not None and speed.prompts is not None and speed.decodes is not None:
        prompts, decodes = speed.prompts.slowdown, speed.decodes.slowdown
    if prompts is None or decodes is None:
        return []
    if abs(prompts - decodes) < 0.2 * max(prompts, decodes):
        which = "both alike: the whole device"
    elif prompts > decodes:
        which = "arithmetic more than memory, as with a lowered clock"
    else:
        which = "memory more than arithmetic, or a fixed cost of each step"
    return [
        evidence(f"steps with prompts take {prompts:.2f} times the normal time, steps without {decodes:.2f} times: "
                 f"{which}", prompts / max(decodes, 1e-9), "ratio", PER_STEP, weight=0.5)
    ]  # fmt: skip


def _neighbour_evidence(facts: Facts, *, supports: bool) -> list[Evidence]:
    machine = facts.machine
    if machine is None or machine.core_queued is None:
        return []
    others = machine.core_queued_by_others_worst or 0.0
    is_queued = others >= HELD and (machine.others_cores_worst or 0.0) >= NEIGHBOUR_CORES
    statement = f"the engine's threads wait for a core in {machine.core_queued:.0%} of the steps' time"
    statement += ": another process has it" if is_queued else ": the cores are its own"
    return [evidence(statement, machine.core_queued, "share", SAMPLED, supports=is_queued == supports)]


def _grows(speed: SpeedFacts | None) -> float:
    """Slowdown of decode steps with much context over that with little; 1 where it is not known."""
    known = speed is not None and speed.source == "reference" and speed.decodes is not None
    return speed.with_context or 1.0 if known else 1.0
