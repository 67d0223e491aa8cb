"""Other kernels would compute the same faster, or one kernel is slow: the slowdown grows with its own work."""

from collections.abc import Mapping
from typing import Any

from sojourn.diagnosis.cause import Cause, Change, Excess, Proposal, Records, Rule, evidence
from sojourn.diagnosis.proposal import all_of
from sojourn.diagnosis.statements import device
from sojourn.diagnosis.statements.excess import SLOW_DEVICE, excess_evidence, missing_share
from sojourn.diagnosis.symptom_tree.reading import DEVICE_TIME
from sojourn.metrics.compute.speed_facts import SpeedFacts


def read_records(facts: Records, excess: Excess) -> Proposal | None:
    speed = facts.speed()
    chosen = {name: facts.engine[name] for name, usual in (("attention_backend", "auto"), ("fused_operations", "auto"))
              if facts.engine.get(name) not in (None, usual)}  # fmt: skip
    if chosen:
        return _slower_settings(excess, speed, chosen)
    grows = device.growth_with_context(speed)
    if speed is None or grows < device.WITH_CONTEXT or speed.decodes.slowdown < SLOW_DEVICE:
        return None
    factor = speed.device.slowdown
    return Proposal(
        cause=f"attention is slow: decode steps take {speed.decodes.slowdown:.1f} times as long as normal, and the "
        "more so the more context they have",
        evidence=[
            evidence(f"with much context decode steps are slowed {grows:.1f} times as much as with little, at as many "
                     "sequences", grows, "ratio", device.PER_STEP, weight=3),
            *device.neighbour_evidence(facts, supports=False),
            *excess_evidence(excess, (*device.DEVICE_ACCOUNTS, *device.WAITS)),
        ],
        measurement="a profile of some steps: `POST /debug/profile` names the time of each class of kernels",
        if_cause="attention takes the time that is lost, and the other kernels are as fast as ever",
        if_rival="all kernels are slow alike",
        change="another attention backend, or the version of the kernels that the reference was measured with",
        claims=device.claim_slowness(facts, factor),
        fixes=(Change(device_speed=max(factor, 1.01)),),
    )  # fmt: skip


def _slower_settings(excess: Excess, speed: SpeedFacts | None, chosen: Mapping[str, Any]) -> Proposal | None:
    """Kernels that the run's own settings forbid."""
    faster = [each for each in (speed.others if speed else []) if set(each.settings) & set(chosen)]
    best = faster[0].speedup if faster else None
    if best is not None and best < device.FASTER_SETTINGS:
        return None
    settings = dict.fromkeys(chosen, "auto")
    named = ", ".join(f"{name}={value}" for name, value in chosen.items())
    known = (
        evidence(f"with {', '.join(f'{name}=auto' for name in chosen)} the same steps take {1 / best:.0%} of the time",
                 best, "ratio", device.PER_STEP, weight=3)
        if best is not None else
        evidence(f"{named} is set, and the fastest kernels are those of auto", 1, "setting", "run.json: engine")
    )  # fmt: skip
    factor = best if best is not None else SLOW_DEVICE
    return Proposal(
        kind="policy",
        cause=f"{named} computes with slower kernels than this device has",
        evidence=[known, *excess_evidence(excess, (*device.DEVICE_ACCOUNTS, *device.WAITS))],
        measurement="the same scenario with the fastest kernels",
        settings=settings,
        if_cause=f"device time falls to {1 / factor:.0%}",
        if_rival=f"device time stays, and so does {missing_share(excess)}",
        claims=all_of((*device.DEVICE_ACCOUNTS, *device.WAITS), 1 - 1 / factor),
        fixes=(Change(settings=settings, device_speed=factor),),
    )


CAUSE = Cause(
    key="slow_kernel",
    lifecycles=("compute",),
    object="kernels",
    kind="fault",
    rival="a slow device: all its work would be slow",
    rival_key="slow_device",
    asks="Are the kernels far from what the device can do?",
    measurement="a profile burst (sojourn serve, POST /debug/profile) against the roofline",
    booked=DEVICE_TIME,
    lacks="a profile burst of kernels",
    complaints={"high_ttft": 7, "high_itl": 9, "devices_do_not_help": 3},
    reads={Records: Rule(read_records, needs=("excess", "steps"))},
)
