"""What sensors say of a device: a clock that is held down, errors, and what bounds its work while requests run.

A sensor that is not there proves nothing. A power cap at the device's own limit and a clock that nobody held down are
what any healthy device shows under load, so that neither is a cause.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal, NamedTuple

from sojourn.diagnosis.cause import Refutation
from sojourn.diagnosis.evidence import Client, Means, view_of
from sojourn.diagnosis.excess import SERVED, Excess
from sojourn.diagnosis.sensor_facts import FEWEST, DeviceFacts, SensorFacts, busiest_device
from sojourn.diagnosis.statements.means import part_of_excess
from sojourn.diagnosis.symptoms import LOW_DEVICE_BUSY
from sojourn.diagnosis.verdict import Evidence, Finding, evidence
from sojourn.interop.sources.pressure import WAITING

SOURCE = "sensors"
OFTEN = 0.5  # of the readings
SLOWER = 0.1  # of the clock, from which a throttle costs anything that is worth a name
HARDLY = 0.2  # of the time: the clock of a device that hardly works is low rightly
SET_LOW, CAPPED_LOW = 0.75, 0.6  # of the highest clock: a full load on a sound device takes a fifth of it, or a third
LOWERED = 0.9  # of the default power limit
NOT_FULL = 0.8  # of the power limit: a clock that is low below it is not low for the power
HARD = ("hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake")
ALWAYS_BUSY = 0.8  # of the readings with requests in flight: a device without requests idles rightly
SMS_IDLE, SMS_WORK, READS, COMPUTES, LINK = 0.3, 0.8, 0.6, 0.5, 0.5
FULL, LITTLE_POWER = 0.9, 0.3  # of the time, and of the limit: no device that computes draws less
LINK_UNKNOWN = 8e9  # bytes/s, half of what 16 lanes of the third generation carry
MUCH = 1e9  # bytes/s of a link, that a line names
STOLEN = 0.1  # of the CPUs' time
MOST, UNKNOWN_PART = 0.9, 0.5  # of an excess that a cause explains
CPU_SLOW, CPU_BUSY = 0.5, 0.3  # of the highest clock: all cores together reach two thirds of that of one
Bound = Literal["host", "pcie", "memory", "compute", "launches", ""]
REASONS: Mapping[str, str] = {
    "hw_slowdown": "a hardware slowdown (heat, power or the supply)", "sw_thermal": "heat (the driver's limit)",
    "hw_thermal": "heat (the hardware's limit)", "hw_power_brake": "the power brake of the supply",
    "sw_power_cap": "the power cap", "applications_clocks": "a setting of the clock",
    "sync_boost": "a group of devices with one clock", "display_clocks": "a setting for displays",
}  # fmt: skip
# NVIDIA's numbers of the errors that servers meet. A program's own fault is none of the device.
XIDS: Mapping[int, str] = {
    13: "a fault of the program that ran", 31: "a memory fault of the program that ran",
    43: "a program that was stopped", 45: "a program that ended before its work",
    48: "memory that could not be corrected", 61: "the device's own controller", 62: "the device's own controller",
    63: "rows of memory were replaced", 64: "rows of memory could not be replaced", 74: "an error of NVLink",
    79: "the device fell off its bus", 92: "many corrected errors of memory", 94: "an error of memory, in one program",
    95: "an error of memory, in all programs", 119: "the device's controller does not answer",
    120: "the device's controller failed",
}  # fmt: skip
OF_PROGRAM = (13, 31, 43, 45)


class Throttle(NamedTuple):
    """A clock that is held down, and what it costs."""

    words: str
    reason: str
    lost: float | None  # of the speed; None where no clock shows it
    proof: Evidence


def throttle(device: DeviceFacts, fewest: int = FEWEST) -> Throttle | None:
    """None where the clock is what a sound device has, or too few readings show it."""
    share = device.clock_share
    lost = None if share is None else max(0.0, 1 - share)
    is_idle = device.used is not None and device.used < HARDLY
    if device.readings < fewest or is_idle or (lost is not None and lost < SLOWER):
        return None
    reason = _reason(device, share)
    if not reason:
        return None
    at = "" if share is None else f", at {_mhz(device.clock_used)} of {_mhz(device.clock_limit)} MHz"
    often = max((device.reasons.get(each, 0.0) for each in (*HARD, "sw_power_cap", "applications_clocks")), default=0.0)
    seen = f"{often:.0%} of {device.readings} readings with requests say it" if often else "no sensor of it says why"
    return Throttle(
        f"the clock of {device.device} is held down by {reason}{at}", reason, lost,
        evidence(f"{device.device}: {seen}{at}", often or 1 - (lost or 0.0), "share", f"{SOURCE}: throttle, sm_clock",
                 weight=4 if often else 1),
    )  # fmt: skip


def _reason(device: DeviceFacts, share: float | None) -> str:
    """ "" where the clock is what a sound device has."""
    hard = [each for each in HARD if device.reasons.get(each, 0.0) >= OFTEN]
    if hard:
        return REASONS[hard[-1]]
    limit, default = device.mean("power_limit"), device.mean("power_limit_default")
    if device.reasons.get("sw_power_cap", 0.0) >= OFTEN:
        if limit and default and limit < LOWERED * default:
            return f"a power cap of {limit:,.0f} W, where the device's own is {default:,.0f}"
        if not default and share is not None and share <= CAPPED_LOW:
            return REASONS["sw_power_cap"]
        return ""
    if share is None or share > SET_LOW:
        return ""
    if device.reasons.get("applications_clocks", 0.0) >= OFTEN:
        return REASONS["applications_clocks"]
    power = device.mean("power")
    is_open = not device.says_reasons and power is not None and bool(limit) and power < NOT_FULL * (limit or 0.0)
    return "something that no sensor names" if is_open else ""


def _mhz(clock: float | None) -> str:
    return f"{(clock or 0.0) / 1e6:,.0f}"


def errors(device: DeviceFacts) -> Iterator[tuple[str, bool]]:
    """Sentences, and whether each is of an error that came meanwhile and is the device's own."""
    for numbers, when in ((device.new_xids, "reported"), (device.old_xids, "had reported before")):
        for number in numbers:
            means = f": {XIDS[number]}" if number in XIDS else "; the kernel's log has what it is"
            yield f"{device.device} {when} Xid {number}{means}", when == "reported" and number not in OF_PROGRAM
    if device.new_ecc:
        yield f"{device.device} had {device.new_ecc:,.0f} new uncorrected errors of memory", True
    elif device.old_ecc:
        yield f"{device.device} has {device.old_ecc:,.0f} uncorrected errors of memory, all of before", False


def bound(device: DeviceFacts) -> Bound:
    """What holds the work of a device up while requests are in flight; "" where the sensors leave it open."""
    used, reads = device.used, device.mean("memory_bandwidth") or 0.0
    if device.readings < FEWEST or used is None:
        return ""
    works = device.means.get("sm_activity", used)
    if link_use(device) >= LINK and works < LOW_DEVICE_BUSY and reads < READS:
        return "pcie"
    if used < LOW_DEVICE_BUSY:
        return "host"
    tensor = device.mean("tensor_activity") or 0.0
    if reads >= READS and tensor < COMPUTES:
        return "memory"
    return "compute" if tensor >= COMPUTES or _draws_all(device) else "launches" if _does_little(device) else ""


def _draws_all(device: DeviceFacts) -> bool:
    return device.means.get("sm_activity", 0.0) >= SMS_WORK and _power_share(device) > NOT_FULL


def _does_little(device: DeviceFacts) -> bool:
    """Some kernel always runs, and the SMs and the memory hardly work, or the power says so."""
    sms, reads = device.mean("sm_activity"), device.mean("memory_bandwidth")
    if sms is not None:
        return sms < SMS_IDLE and (reads is None or reads < SMS_IDLE)
    return (device.used or 0.0) >= FULL and 0 < _power_share(device) < LITTLE_POWER


def link_use(device: DeviceFacts) -> float:
    """Of what the link carries; of an unknown link, LINK is at LINK_UNKNOWN."""
    rate = device.pcie_rate
    return 0.0 if rate is None else rate / (device.pcie_link or LINK_UNKNOWN / LINK)


def _power_share(device: DeviceFacts) -> float:
    power, limit = device.mean("power"), device.mean("power_limit")
    return power / limit if power is not None and limit else 0.0


def sentence(device: DeviceFacts, *, is_only: bool = True) -> str:
    """What the device did while requests were in flight; "" without enough readings. `is_only`: it is the server's."""
    if device.readings < FEWEST or device.used is None:
        return ""
    says = {
        "host": "it idles while requests are in flight: the host holds it up"
        if is_only
        else "it idles, and another one works: it need not be the server's",
        "pcie": f"it waits for PCIe: {(device.pcie_rate or 0.0) / 1e9:.1f} GB/s go over the link",
        "memory": "it is bound by memory bandwidth: a larger batch gives more tokens for the same reads of weights",
        "compute": "it is bound by what it can compute",
        "launches": "its kernels are too small to fill it: small batches, no graphs, or waits for other devices",
        "": "",
    }[bound(device)]
    return f"{device.device}: {figures(device)}" + (f"; {says}" if says else "")


def figures(device: DeviceFacts) -> str:
    """The means of a device in one line."""
    shares = (("works", ("engine_activity", "gpu_utilisation")), ("SMs", ("sm_activity",)),
              ("tensor cores", ("tensor_activity",)), ("memory bandwidth", ("memory_bandwidth",)))  # fmt: skip
    found = [f"{name} {value:.0%}" for name, names in shares if (value := device.mean(*names)) is not None]
    if device.clock_used is not None:
        found.append(f"{_mhz(device.clock_used)} of {_mhz(device.clock_limit)} MHz")
    if (power := device.mean("power")) is not None:
        limit = device.mean("power_limit")
        found.append(f"{power:,.0f} W" if not limit else f"{power:,.0f} of {limit:,.0f} W")
    links = (("PCIe", ("pcie_rx", "pcie_tx")), ("NVLink", ("nvlink_rx", "nvlink_tx")))
    for name, ways in links:
        rate = max((device.means.get(way, 0.0) for way in ways), default=0.0)
        found += [f"{name} {rate / 1e9:.1f} GB/s"] if rate >= MUCH else []
    return ", ".join(found)


def throttled(facts: Client) -> list[tuple[DeviceFacts, Throttle]]:
    """The devices that work and whose clock is held down, the slowest first."""
    found = [(each, how) for each in devices_of(facts) if (how := throttle(each)) is not None]
    return sorted(found, key=lambda pair: -(pair[1].lost or 0.0))


def held_up(facts: Client, by: Bound) -> DeviceFacts | None:
    """The device that works most, where this bounds it: of a node with idle devices, they are not the server's."""
    seen = facts.sensors
    if seen is None or (seen.in_flight is not None and seen.in_flight < ALWAYS_BUSY):
        return None
    busiest = busiest_device(seen)
    return busiest if busiest is not None and bound(busiest) == by else None


def devices_of(facts: Client) -> list[DeviceFacts]:
    return list(facts.sensors.devices) if facts.sensors is not None else []


def whose_devices(facts: Client) -> list[Evidence]:
    """That nobody said which of several devices are the server's."""
    seen = facts.sensors
    if seen is None or not seen.are_all or len(seen.devices) < 2:
        return []
    return [evidence(f"which of the {len(seen.devices)} devices are the server's is not known: name them, as in "
                     "--sensors SOURCE#0,1", len(seen.devices), "devices", SOURCE, weight=0)]  # fmt: skip


def problems(seen: SensorFacts) -> list[str]:
    """What is wrong with a device or the host, whether or not requests lose anything by it."""
    found = [how.words for each in seen.devices if (how := throttle(each)) is not None]
    found += [words for each in seen.devices for words, _ in errors(each)]
    if (words := cpu_problem(seen)) is not None:
        found.append(words[0])
    return found


def _full_clock(facts: Means) -> str:
    working = [each for each in devices_of(facts) if each.clock_share is not None and each.readings >= FEWEST]
    slowest = min(working, key=lambda each: each.clock_share or 0.0, default=None)
    has_failed = any(is_own for each in devices_of(facts) for _, is_own in errors(each))
    if has_failed or slowest is None or slowest.clock_share is None or slowest.clock_share <= 1 - SLOWER:
        return ""
    return f"{slowest.device} works at {_mhz(slowest.clock_used)} of {_mhz(slowest.clock_limit)} MHz"


def _busy_device(facts: Means) -> str:
    busiest = busiest_device(facts.sensors)
    if busiest is None or busiest.used is None or busiest.used < LOW_DEVICE_BUSY:
        return ""
    return f"{busiest.device} works {busiest.used:.0%} of the time in which requests are in flight"


def _idle_link(facts: Means) -> str:
    known = [each for each in devices_of(facts) if each.pcie_rate is not None and each.readings >= FEWEST]
    most = max(known, key=link_use, default=None)
    if most is None or link_use(most) >= LINK:
        return ""
    return f"only {(most.pcie_rate or 0.0) / 1e9:.1f} GB/s go over the PCIe link of {most.device}"


def _nothing_stolen(facts: Means) -> str:
    cpu = facts.sensors.cpu if facts.sensors is not None else None
    stolen = cpu.mean("cpu_steal") if cpu is not None else None
    return "" if stolen is None or stolen >= STOLEN else f"the hypervisor takes {stolen:.0%} of the CPU time"


FULL_CLOCK = Refutation("clocks of the devices", _full_clock)
BUSY_DEVICE = Refutation("use of the devices", _busy_device)
IDLE_LINK = Refutation("bytes over PCIe", _idle_link)
NOTHING_STOLEN = Refutation("stolen CPU time", _nothing_stolen)


def unsaid(seen: SensorFacts | None, found: Iterable[Finding]) -> list[str]:
    """The problems that no finding names."""
    said = " ".join(fact for each in found for fact in (each.cause, *(one.statement for one in each.evidence)))
    return [each for each in problems(seen) if each not in said] if seen is not None else []


def device_lines(seen: SensorFacts | None) -> list[str]:
    """A sentence for each device and for the CPU: what it did while requests were in flight, and what is wrong."""
    if seen is None:
        return []
    found, busiest, is_only = [], busiest_device(seen), not seen.are_all
    for each in seen.devices:
        how = throttle(each)
        wrong = [*([f"its clock is held down by {how.reason}"] if how is not None else []),
                 *(words.removeprefix(f"{each.device} ") for words, _ in errors(each))]  # fmt: skip
        line = (
            sentence(each, is_only=is_only or each is busiest)
            or f"{each.device}: {each.readings} readings with requests in flight, too few to judge"
        )
        found.append("; ".join([line, *(wrong or _unshown(each))]))
    if seen.cpu is not None and seen.cpu.readings:
        shares = (("busy", "cpu_busy"), ("stolen", "cpu_steal"))
        parts = [f"{value:.0%} {name}" for name, key in shares if (value := seen.cpu.mean(key)) is not None]
        if (clock := seen.cpu.mean("cpu_clock")) is not None:
            limit = seen.cpu.highest.get("cpu_clock_limit")
            parts.append(f"{clock / 1e9:.1f}" + (f" of {limit / 1e9:.1f} GHz" if limit else " GHz"))
        found.append(f"{seen.cpu.device}: {', '.join(parts)}")
    return found


def _unshown(device: DeviceFacts) -> Iterator[str]:
    """What stays open for want of a sensor, and which one would show it."""
    if device.readings < FEWEST or device.used is None:
        return
    if not device.says_reasons and device.clock_share is not None and device.clock_share <= SET_LOW:
        yield "why its clock is low no sensor says: DCGM_FI_DEV_CLOCKS_EVENT_REASONS, or nvml, would"
    if device.used >= LOW_DEVICE_BUSY and not {"sm_activity", "memory_bandwidth"} & device.means.keys():
        yield "how much of it works no sensor says: DCGM_FI_PROF_SM_ACTIVE and DCGM_FI_PROF_DRAM_ACTIVE would"


def cpu_problem(seen: SensorFacts) -> tuple[str, float] | None:
    """Of the host's CPUs: what is wrong, and the share of their time or speed that is lost."""
    cpu = seen.cpu
    if cpu is None or cpu.readings < FEWEST:
        return None
    stolen, clock, limit = cpu.mean("cpu_steal") or 0.0, cpu.mean("cpu_clock"), cpu.highest.get("cpu_clock_limit")
    if stolen >= STOLEN:
        return f"the hypervisor gives {stolen:.0%} of the host's CPU time to other machines", stolen
    busy = cpu.mean("cpu_busy") or 0.0
    if clock and limit and clock < CPU_SLOW * limit and busy >= CPU_BUSY:
        return (f"the host's CPUs run at {clock / 1e9:.1f} of {limit / 1e9:.1f} GHz and are {busy:.0%} busy",
                1 - clock / limit)  # fmt: skip
    return None


def part_lost(facts: Client, excess: Excess, lost: float | None) -> float:
    """Of an excess, what goes at full speed, where now that share of the speed is lost. At full speed a line does not
    form where those that wait at the end would have been served as well."""
    view = view_of(facts)
    waiting = view.gauges.get(WAITING) if view is not None else None
    if lost is None or excess.objective == SERVED:
        return UNKNOWN_PART
    ended = view.finished if view is not None and excess.objective == "ttft_ms" else None
    if ended and waiting is not None and ended / (1 - min(lost, 0.99)) >= ended + waiting.last:
        return MOST
    return part_of_excess(excess, lost)


def room_in_device(facts: Client, *, wanted: bool) -> list[Evidence]:
    """What sensors say of room for a larger batch."""
    seen = facts.sensors
    device = busiest_device(seen)
    what = bound(device) if device is not None else ""
    if device is None or what not in ("host", "memory", "compute", "launches"):
        return []
    return [evidence(sentence(device), device.used or 0.0, "share", SOURCE, supports=(what != "compute") == wanted)]
