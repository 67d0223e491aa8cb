"""What sensors of GPUs say: throttles, errors, and a device that is used and hardly works."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from sojourn.interop.held.held import Reading
from sojourn.interop.sources.sensors import reasons_of

WANTED = {"applications_clocks", "sw_power_cap", "sync_boost", "display_clocks"}  # that somebody set, or full load
OFTEN = 0.5  # of the readings
USED, WORKS = 0.9, 0.3  # utilisation that says "used", and the share of the power limit of one that computes little
IDLE = 0.3
FEWEST = 5  # readings


class SensorFact(NamedTuple):
    sentence: str
    is_problem: bool
    cause: str = ""
    confidence: float = 0.0
    rival: str = ""
    unknown: str = ""


def facts(readings: Sequence[Reading]) -> Iterator[SensorFact]:
    for device in dict.fromkeys(each.device for each in readings):
        of_device = [each for each in readings if each.device == device]
        yield from _throttles(device, of_device)
        yield from _errors(device, of_device)
        yield from _work(device, of_device)


def _values(readings: Sequence[Reading], name: str) -> list[float]:
    return [each.value for each in readings if each.name == name]


def _throttles(device: str, readings: Sequence[Reading]) -> Iterator[SensorFact]:
    bits = _values(readings, "throttle")
    by_reason: dict[str, int] = {}
    for each in bits:
        for reason in reasons_of(each):
            by_reason[reason] = by_reason.get(reason, 0) + 1
    for reason, times in by_reason.items():
        if reason in WANTED or times < OFTEN * len(bits):
            continue
        yield SensorFact(
            f"{device} was throttled in {times} of {len(bits)} readings: {reason.replace('_', ' ')}", True,
            "the device was throttled: its clock was held down", 0.8, "another cause, beside which it costs little",
        )  # fmt: skip


def _errors(device: str, readings: Sequence[Reading]) -> Iterator[SensorFact]:
    for xid in sorted({int(each) for each in _values(readings, "xid") if each > 0}):
        yield SensorFact(f"{device} reported Xid {xid}", True, unknown=f"what Xid {xid} did: the kernel's log has it")
    if max(_values(readings, "ecc_uncorrected"), default=0) > 0:
        yield SensorFact(f"{device} has uncorrected ECC errors", True)


def _work(device: str, readings: Sequence[Reading]) -> Iterator[SensorFact]:
    used, power, limit = (_values(readings, name) for name in ("gpu_utilisation", "power", "power_limit"))
    activity = _values(readings, "sm_activity")
    if not used:
        return
    if fmean(used) >= USED and power and limit and max(limit) > 0 and fmean(power) < WORKS * max(limit):
        share = fmean(power) / max(limit)
        yield SensorFact(
            f"{device} is {fmean(used):.0%} used at {share:.0%} of its power: a kernel runs and does little", True,
            unknown="whether it waits for other devices or hangs: sm_activity and the server's log show it",
        )  # fmt: skip
    elif fmean(used) < IDLE and len(used) >= FEWEST:
        yield SensorFact(f"{device} was {fmean(used):.0%} used over {len(used)} readings: it had little to do", False,
                         unknown="whether requests waited meanwhile: the server's log or page shows it")  # fmt: skip
    if activity and fmean(used) >= USED and fmean(activity) < IDLE:
        yield SensorFact(f"{device} is {fmean(used):.0%} used, and its SMs {fmean(activity):.0%} of the time", True,
                         unknown="what holds the SMs: memory bandwidth, launches or other devices")  # fmt: skip
