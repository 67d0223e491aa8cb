"""What sensors showed of each device while requests were in a server: joined by time, as means over the readings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pandas as pd

from sojourn.interop.sources.sensor_names import CPU, reasons_of
from sojourn.metrics.machine.steal import Steal

USED = 0.5  # of a reading's time that a kernel ran: the clock of a device that idles says nothing
# Bytes per second of a lane, by the generation of PCIe.
LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
REACH_NS = 1_000_000_000  # before a reading: a sensor shows the mean of the second before it
FEWEST = 5  # readings with requests in flight: fewer may be chance
WORK = ("engine_activity", "gpu_utilisation")  # whether any kernel ran, the finer one first


@dataclass(frozen=True, slots=True)
class Flight:
    """How many requests were in the server: from each moment on, until the next."""

    ns: np.ndarray  # [n], ascending
    requests: np.ndarray  # [n]

    def least(self, at_ns: np.ndarray) -> np.ndarray:
        """[readings] The fewest requests in the second before each moment, as far as it is known."""
        known = np.concatenate(([0.0], self.requests))  # before the first moment nobody is known to be there
        first = np.searchsorted(self.ns, at_ns - REACH_NS, side="right")
        last = np.searchsorted(self.ns, at_ns, side="right")
        return np.array([known[low : high + 1].min() for low, high in zip(first, last, strict=True)])


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device, over the readings with requests in flight; without a flight over all of them."""

    device: str
    readings: int
    means: Mapping[str, float]  # name of a sensor → mean
    highest: Mapping[str, float]  # over all readings, those without requests among them
    clock_used: float | None  # mean SM clock of the readings in which the device worked
    reasons: Mapping[str, float]  # why the clock was low → share of the readings that say it
    says_reasons: bool  # whether any reading has them
    new_xids: Sequence[int] = ()  # errors that came while it was sampled
    old_xids: Sequence[int] = ()  # the last error before
    new_ecc: float = 0.0  # uncorrected errors of memory that came meanwhile
    old_ecc: float = 0.0

    def mean(self, *names: str) -> float | None:
        """Of the first of these sensors that the device has."""
        return next((self.means[name] for name in names if name in self.means), None)

    @property
    def used(self) -> float | None:
        """Of the time, some kernel ran."""
        return self.mean(*WORK)

    @property
    def clock_limit(self) -> float | None:
        """What the device states, or the highest clock that it had."""
        return self.highest.get("sm_clock_limit") or self.highest.get("sm_clock")

    @property
    def clock_share(self) -> float | None:
        """Of the limit, the clock at which it worked."""
        limit = self.clock_limit
        return self.clock_used / limit if self.clock_used is not None and limit else None

    @property
    def pcie_rate(self) -> float | None:
        """Bytes per second of the busier direction."""
        rates = [self.means[name] for name in ("pcie_rx", "pcie_tx") if name in self.means]
        return max(rates, default=None)

    @property
    def pcie_link(self) -> float | None:
        """Bytes per second that its link carries in one direction."""
        lane = LANE.get(round(self.highest.get("pcie_generation", 0.0)))
        return lane * self.highest["pcie_lanes"] if lane and self.highest.get("pcie_lanes") else None


@dataclass(frozen=True, slots=True)
class SensorFacts:
    devices: Sequence[DeviceFacts] = ()  # GPUs
    cpu: DeviceFacts | None = None
    in_flight: float | None = None  # share of the readings' time with requests in the server; None: not known
    are_all: bool = False  # which of the devices are the server's is not known


def busiest_device(seen: SensorFacts | None) -> DeviceFacts | None:
    """That which works most: of a node with idle devices, the others need not be the server's."""
    devices = seen.devices if seen is not None else ()
    known = [each for each in devices if each.used is not None and each.readings >= FEWEST]
    return max(known, key=lambda each: each.used or 0.0, default=None)


def flight_of(begins_ns: np.ndarray, ends_ns: np.ndarray) -> Flight:
    """From when each request came and ended."""
    moments = np.concatenate((begins_ns, ends_ns))
    change = np.concatenate((np.ones(len(begins_ns)), -np.ones(len(ends_ns))))
    order = np.lexsort((-change, moments))
    return Flight(moments[order], np.cumsum(change[order]))


def steal_of(seen: SensorFacts | None) -> Steal | None:
    """What the hypervisor took of the host, by its sensor."""
    cpu = seen.cpu if seen is not None else None
    if cpu is None or "cpu_steal" not in cpu.means:
        return None
    return Steal(100 * cpu.means["cpu_steal"], 100 * cpu.highest["cpu_steal"])


def sensor_facts(rows: pd.DataFrame, flight: Flight | None = None, *, are_all: bool = False) -> SensorFacts | None:
    """Of the table `sensors` of a stretch of time; None where it is empty. The CPU counts with all its readings: what
    the hypervisor takes, it takes from whatever comes next."""
    if not len(rows):
        return None
    busy = np.ones(len(rows), dtype=bool)
    if flight is not None and len(flight.ns):
        busy = (flight.least(rows.ns.to_numpy("int64")) > 0) | (rows.device == CPU).to_numpy()
    of_gpus = busy[(rows.device != CPU).to_numpy()]
    found = [_device(str(name), own, busy[rows.device == name]) for name, own in rows.groupby("device", sort=True)]
    return SensorFacts(
        devices=[each for each in found if each.device != CPU],
        cpu=next((each for each in found if each.device == CPU), None),
        in_flight=float(of_gpus.mean()) if flight is not None and len(of_gpus) else None,
        are_all=are_all,
    )


def _device(name: str, rows: pd.DataFrame, busy: np.ndarray) -> DeviceFacts:
    own = rows[busy]
    table = own.pivot_table(index="ns", columns="name", values="value", aggfunc="last") if len(own) else pd.DataFrame()
    bits = table["throttle"].dropna() if "throttle" in table else pd.Series(dtype=float)
    shares: dict[str, float] = {}
    for value in bits:
        for reason in reasons_of(value):
            shares[reason] = shares.get(reason, 0.0) + 1 / len(bits)
    for sensor, reason in (("thermal_violation", "sw_thermal"), ("power_violation", "sw_power_cap")):
        if sensor in table and reason not in shares and len(told := table[sensor].dropna()):
            shares[reason] = float((told > 0).mean())
    old, new = _errors(rows[rows.name == "xid"].value)
    ecc = rows[rows.name == "ecc_uncorrected"].value
    return DeviceFacts(
        device=name,
        readings=len(table),
        means={str(sensor): float(table[sensor].mean()) for sensor in table if table[sensor].notna().any()},
        highest={str(sensor): float(values.max()) for sensor, values in rows.groupby("name").value},
        clock_used=_clock_used(table),
        reasons=shares,
        says_reasons=bool(len(bits)) or "thermal_violation" in table,
        new_xids=new,
        old_xids=old,
        new_ecc=float(ecc.iloc[-1] - ecc.iloc[0]) if len(ecc) > 1 and ecc.iloc[-1] > ecc.iloc[0] else 0.0,
        old_ecc=float(ecc.iloc[0]) if len(ecc) else 0.0,
    )


def _clock_used(table: pd.DataFrame) -> float | None:
    """Sources come at moments of their own: a clock is of the last reading of the work beside it."""
    work = next((name for name in WORK if name in table), None)
    if "sm_clock" not in table or work is None:
        return None
    clocks = table.sm_clock[table[work].ffill().bfill() >= USED].dropna()
    return float(clocks.mean()) if len(clocks) else None


def _errors(numbers: pd.Series) -> tuple[list[int], list[int]]:
    """The Xid of before the first reading, and those that came since. A page repeats the last one, and 0 is none."""
    shown = [int(each) for each in numbers]
    new = [after for before, after in pairwise(shown) if after and after != before]
    return shown[:1] if shown and shown[0] else [], list(dict.fromkeys(new))
