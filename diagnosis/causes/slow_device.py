"""The device takes longer than at its normal speed, all the time or for a while."""

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
from sojourn.diagnosis.proposal import Gain
from sojourn.diagnosis.statements import device, sensors
from sojourn.diagnosis.statements.accounts import DEFINING, PREDICTION, mean_of, propose
from sojourn.diagnosis.statements.excess import SLOW_DEVICE, excess_evidence, missing_share
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME, Reading
from sojourn.metrics.compute.speed_facts import SpeedFacts, stored_entries

LITTLE = "a load that is too large: at its full clock the device would be full, too"


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    whole, worst = device.slowness(facts)
    speed = facts.speed()
    usual = 1.0 if speed is None else min(speed.quarters)
    for_a_while = usual < SLOW_DEVICE and worst >= SLOW_DEVICE * max(1.0, usual)  # the rest of the run is not slow
    always = whole >= SLOW_DEVICE and not for_a_while
    if not (always or for_a_while) or excess.share(*device.DEVICE_ACCOUNTS, *device.WAITS) <= 0:
        return None
    times, part = (whole, "") if always else (worst, " for a while")
    grows = device.growth_with_context(speed)
    return Proposal(
        cause=f"the device takes {times:.1f} times as long as normal for the same steps{part}",
        evidence=[
            *_pace_evidence(facts, whole, worst),
            *_phase_evidence(facts, speed),
            *device.neighbour_evidence(facts, supports=False),
            *(how.proof for _, how in sensors.throttled(facts)),
            *([evidence(f"the slowdown grows with the context, {grows:.1f} times: a kernel of attention, not the whole "
                        "device", grows, "ratio", device.PER_STEP, supports=False, weight=3)]
              if grows >= device.WITH_CONTEXT else []),
            *excess_evidence(excess, (*device.DEVICE_ACCOUNTS, *device.WAITS)),
        ],
        measurement="the same scenario on a quiet machine, with the device's clock and its other processes in view",
        settings={},
        if_cause=f"device time / normal time falls from {times:.1f} to about 1.0",
        if_rival=f"device time / normal time stays near {times:.1f}, and falls with smaller batches",
        change="find what slows the device: a lowered clock, a neighbour process, a slow kernel",
        claims=device.claim_slowness(facts, times),
        fixes=(Change(device_speed=max(times, 1.01)),),  # the steps that are at normal speed now are in time anyway
        steps=speed.worst_steps if speed is not None and not always else None,
    )  # fmt: skip


def read_sensors(facts: Means | Client, excess: Excess) -> Proposal | None:
    """A clock that is held down while requests are in flight; of requests that failed, an error of a device."""
    if excess.objective == SERVED:
        return _of_errors(facts, excess)
    slow = sensors.throttled(facts)
    if not slow:
        return None
    lost = slow[0][1].lost
    fast = "" if lost is None else f", the device takes {1 - lost:.0%} of the time for the same steps"
    return Proposal(
        cause=slow[0][1].words,
        evidence=[*(how.proof for _, how in slow), *sensors.whose_devices(facts)],
        measurement="`nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE` on the server's host, and the same load "
        "once the clock is free",
        settings={},
        if_cause=f"with its clock free{fast}, and {missing_share(excess)} falls",
        if_rival=f"the clock is free, and {missing_share(excess)} stays",
        change="cooling, the power limit (`nvidia-smi -pl`) or the clock's setting (`nvidia-smi -rgc`)",
        explained=sensors.part_lost(facts, excess, lost),
        gain=Gain("the gain is not known" if lost is None else f"at most {lost:.0%} of the time of its steps",
                  basis="the sensors' clock against its highest; steps bound by memory gain less"),
    )  # fmt: skip


def _of_errors(facts: Client, excess: Excess) -> Proposal | None:
    """What makes requests slow is another matter: an error ends them."""
    own = [words for each in sensors.devices_of(facts) for words, is_own in sensors.errors(each) if is_own]
    if not own:
        return None
    return Proposal(
        cause=own[0],
        evidence=[
            *(evidence(each, 1.0, "errors", f"{sensors.SOURCE}: xid, ecc_uncorrected", weight=2) for each in own),
            *sensors.whose_devices(facts),
        ],
        measurement="`dmesg | grep -i xid` and `nvidia-smi -q -d ECC` on the server's host, beside the moments at "
        "which requests failed",
        settings={},
        if_cause="requests fail from that moment on",
        if_rival="requests failed before, or fail at other moments",
        change="take the device out of service until it was reset and tested",
        explained=sensors.UNKNOWN_PART,
        gain=Gain("the gain is not known", basis="sensors count errors, and no request that they ended"),
    )


def read_accounts(facts: Accounts, excess: Excess) -> Proposal | None:
    """The server's own metric of device time over predicted time is above one."""
    ratio = mean_of(facts, PREDICTION)
    if ratio is None or ratio < SLOW_DEVICE:
        return None
    slow = evidence(f"steps take {ratio:.1f} times as long as their composition explains", ratio, "ratio",
                    f"scrapes: {PREDICTION}", weight=DEFINING)  # fmt: skip
    accounts = ("compute.decode", "compute.prefill")
    return propose(excess, f"the device takes {ratio:.1f} times as long as its steps explain",
                   [slow, *excess_evidence(excess, accounts)], "find what slows the device")  # fmt: skip


def _pace_evidence(facts: Records, whole: float, worst: float) -> list[Evidence]:
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
                 "times over the worst quarter", slow, "ratio", device.PER_STEP, supports=slow >= SLOW_DEVICE,
                 weight=2 if speed.source == "reference" else 1.5),
        evidence(f"the reference has {speed.entries} entries and knows {speed.covered:.0%} of the device time",
                 speed.covered, "share", device.PER_STEP, weight=0),
    ]  # fmt: skip


def _phase_evidence(facts: Records, speed: SpeedFacts | None) -> list[Evidence]:
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
                 f"{which}", prompts / max(decodes, 1e-9), "ratio", device.PER_STEP, weight=0.5)
    ]  # fmt: skip


def show_device_slowdown(facts: Records) -> Reading | None:
    """Against normal speed where it is known; else only against the rest of the run, which rules no slow whole out."""
    speed = facts.speed() if stored_entries(facts.meta) else None  # without a reference it is costly, and not asked
    if speed is not None and speed.source == "reference":
        worst = max(speed.quarters, default=speed.device.slowdown)
        return Reading(
            f"the device takes {speed.device.slowdown:.2f} times its normal time, {worst:.2f} times in a quarter",
            worst < SLOW_DEVICE,
            "steps: device_ns; run.json: speed reference",
            max(0.0, 1 - 1 / max(worst, 1e-9)),
        )
    if facts.steps is None or facts.steps.worst_slowdown is None:
        return None
    worst = facts.steps.worst_slowdown
    return Reading(
        f"in the slowest quarter of the run steps took {worst:.2f} times what their composition explains",
        worst < SLOW_DEVICE,
        "steps: device_ns, predicted_ns",
        max(0.0, 1 - 1 / max(worst, 1e-9)),
    )


CAUSE = Cause(
    key="slow_device",
    lifecycles=("compute",),
    object="device",
    kind="fault",
    rival="large batches: steps that are slow because they hold much",
    rival_key="batch_too_large",
    asks="Is the device slower than its work explains?",
    measurement="the same scenario on a quiet machine, with the device's clock in view",
    figures=(show_device_slowdown,),
    booked=DEVICE_TIME,
    complaints={"high_ttft": 2, "high_itl": 4},
    reads={
        Records: Rule(read_records, needs=("excess", "steps")),
        Means: Rule(read_sensors, needs=(), rival=LITTLE, rival_key="overload", refuted_by=(sensors.FULL_CLOCK,)),
        Client: Rule(read_sensors, needs=(), rival=LITTLE, rival_key="overload"),
        Accounts: Rule(
            read_accounts,
            accounts=("compute.decode", "compute.prefill"),
            rival="large batches",
            rival_key="slow_decode",
        ),
    },
)
