"""What sensors of GPUs show, whoever writes it: a DCGM exporter's page, `nvidia-smi dmon`, its CSV, and NVML.

`NAMES` has each of our names once, with its unit, and what each writer calls it. A column whose unit is not the one
that its writer documents is refused: it stands in `unread`, and no value is taken from it. A sensor that a device lacks
(`-`, `[N/A]`, DCGM's blank values) is no reading.

What readings cannot show: the time between two of them. `gpu_utilisation` says that some kernel ran, not that the
device was full: `sm_activity` says how much of it worked.
"""

import csv
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from sojourn.metrics.machine.sampler import THROTTLE_REASONS, throttle_reasons

PREFIX = "sensor:"  # of our names in the table `scrapes`
SHARE, WATT, HERTZ, CELSIUS, BYTES, RATE, COUNT, BITS = "share", "W", "Hz", "°C", "bytes", "bytes/s", "errors", "bits"
MIB, KB, MHZ = 2.0**20, 1e3, 1e6


class Names(NamedTuple):
    """One sensor: its unit with us, and (name, unit) with each writer."""

    unit: str
    dcgm: tuple[tuple[str, float], ...] = ()  # family → factor: the exporter's page has no unit
    dmon: tuple[str, ...] = ()
    query: tuple[str, ...] = ()  # of --query-gpu


def _same(*names: str, factor: float = 1.0) -> tuple[tuple[str, float], ...]:
    return tuple((f"DCGM_FI_{name}", factor) for name in names)


NAMES: dict[str, Names] = {
    "gpu_utilisation": Names(SHARE, _same("DEV_GPU_UTIL", factor=0.01), ("sm",), ("utilization.gpu",)),
    "engine_activity": Names(SHARE, _same("PROF_GR_ENGINE_ACTIVE"), ("gract",)),
    "sm_activity": Names(SHARE, _same("PROF_SM_ACTIVE"), ("smutil",)),
    "sm_occupancy": Names(SHARE, _same("PROF_SM_OCCUPANCY"), ("smocc",)),
    "tensor_activity": Names(SHARE, _same("PROF_PIPE_TENSOR_ACTIVE"), ("mmaact",)),
    "memory_bandwidth": Names(SHARE, _same("PROF_DRAM_ACTIVE"), ("dram",)),
    "memory_copy": Names(SHARE, _same("DEV_MEM_COPY_UTIL", factor=0.01), ("mem",), ("utilization.memory",)),
    "sm_clock": Names(
        HERTZ, _same("DEV_SM_CLOCK", factor=MHZ), ("pclk",),
        ("clocks.sm", "clocks.current.sm", "clocks.gr", "clocks.current.graphics"),
    ),
    "sm_clock_limit": Names(
        HERTZ, _same("DEV_MAX_SM_CLOCK", factor=MHZ), (), ("clocks.max.sm", "clocks.max.gr", "clocks.max.graphics")
    ),
    "memory_clock": Names(
        HERTZ, _same("DEV_MEM_CLOCK", factor=MHZ), ("mclk",), ("clocks.mem", "clocks.current.memory")
    ),
    "power": Names(
        WATT, _same("DEV_POWER_USAGE", "DEV_POWER_USAGE_INSTANT"), ("pwr",),
        ("power.draw", "power.draw.average", "power.draw.instant"),
    ),
    "power_limit": Names(
        WATT, _same("DEV_ENFORCED_POWER_LIMIT", "DEV_POWER_MGMT_LIMIT"), (), ("enforced.power.limit", "power.limit")
    ),
    "temperature": Names(CELSIUS, _same("DEV_GPU_TEMP"), ("gtemp",), ("temperature.gpu",)),
    "memory_temperature": Names(CELSIUS, _same("DEV_MEMORY_TEMP"), ("mtemp",), ("temperature.memory",)),
    "memory_used": Names(BYTES, _same("DEV_FB_USED", factor=MIB), ("fb",), ("memory.used",)),
    "memory_free": Names(BYTES, _same("DEV_FB_FREE", factor=MIB), (), ("memory.free",)),
    "memory_total": Names(BYTES, _same("DEV_FB_TOTAL", factor=MIB), (), ("memory.total",)),
    "pcie_rx": Names(RATE, _same("PROF_PCIE_RX_BYTES"), ("rxpci", "pcirx")),
    "pcie_tx": Names(RATE, _same("PROF_PCIE_TX_BYTES"), ("txpci", "pcitx")),
    "nvlink_rx": Names(RATE, _same("PROF_NVLINK_RX_BYTES"), ("nvlrx",)),
    "nvlink_tx": Names(RATE, _same("PROF_NVLINK_TX_BYTES"), ("nvltx",)),
    "throttle": Names(
        BITS, _same("DEV_CLOCK_THROTTLE_REASONS", "DEV_CLOCKS_EVENT_REASONS"), (),
        ("clocks_throttle_reasons.active", "clocks_event_reasons.active"),
    ),
    "power_violation": Names(SHARE, (), ("pviol",)),
    "xid": Names(COUNT, _same("DEV_XID_ERRORS")),  # the number of the last error, 0 of none
    "ecc_corrected": Names(
        COUNT, _same("DEV_ECC_SBE_VOL_TOTAL"), ("sbecc",), ("ecc.errors.corrected.volatile.total",)
    ),
    "ecc_uncorrected": Names(
        COUNT, _same("DEV_ECC_DBE_VOL_TOTAL"), ("dbecc",), ("ecc.errors.uncorrected.volatile.total",)
    ),
    "pcie_replays": Names(COUNT, _same("DEV_PCIE_REPLAY_COUNTER"), ("pci",)),
}  # fmt: skip
# How a writer of text writes a unit: ours, and the factor. GPM columns of dmon have it behind a colon.
WRITTEN: dict[str, tuple[str, float]] = {
    "%": (SHARE, 0.01), "W": (WATT, 1.0), "mW": (WATT, 1e-3), "MHz": (HERTZ, MHZ), "C": (CELSIUS, 1.0),
    "MB": (BYTES, MIB), "MiB": (BYTES, MIB), "GiB": (BYTES, 2.0**30), "MB/s": (RATE, 1e6), "MiB/s": (RATE, MIB),
    "KiB/s": (RATE, 2.0**10), "errs": (COUNT, 1.0),
}  # fmt: skip
UNWRITTEN = (CELSIUS, COUNT, BITS)  # nvidia-smi writes no unit behind these
DEVICE_COLUMNS = ("index", "uuid", "gpu_uuid", "pci.bus_id", "gpu_bus_id")
NO_DEVICE = "which GPU a row is of: no column names it, and all rows are taken for one; add index to --query-gpu"
REASON_CELLS = ("Active", "Not Active")  # what else stands there is no reading
REASON_COLUMN = re.compile(r"clocks_(?:throttle|event)_reasons\.(\w+)")
REASONS = {name: bit for bit, name in THROTTLE_REASONS.items()} | {
    "applications_clocks_setting": 0x2, "sw_thermal_slowdown": 0x20, "hw_thermal_slowdown": 0x40,
    "hw_power_brake_slowdown": 0x80, "display_clock_setting": 0x100,
}  # fmt: skip
# DCGM's blank, not found, not supported, not permitted of 32 and of 64 bits, and of a floating-point number.
BLANKS = (range(0x7FFFFFF0, 0x80000000), range(0x7FFFFFFFFFFFFFF0, 0x8000000000000000 + 1), range(2**47, 2**47 + 4))
_BY_DCGM = {theirs: (ours, factor) for ours, each in NAMES.items() for theirs, factor in each.dcgm}
_BY_DMON = {theirs: ours for ours, each in NAMES.items() for theirs in each.dmon}
_BY_QUERY = {theirs: ours for ours, each in NAMES.items() for theirs in each.query}
_MOMENTS = ("%Y/%m/%d %H:%M:%S.%f", "%Y/%m/%d %H:%M:%S", "%Y%m%d %H:%M:%S")


class Reading(NamedTuple):
    """One value of one sensor, in the unit of `NAMES`."""

    ns: int | None  # of the wall clock; None where the text has no moment
    device: str  # "GPU 0"
    name: str
    value: float


@dataclass(slots=True)
class Sensors:
    """Readings in the order of the text, and what it has that was not read, with the reason."""

    kind: str  # "DCGM page", "nvidia-smi dmon", "nvidia-smi CSV", "NVML"
    readings: list[Reading] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)

    def values(self, name: str, device: str | None = None) -> list[float]:
        return [each.value for each in self.readings if each.name == name and device in (None, each.device)]

    @property
    def devices(self) -> list[str]:
        return list(dict.fromkeys(each.device for each in self.readings))

    def rows(self, ns: int | None = None) -> list[dict[str, Any]]:
        """As rows of the table `scrapes`. `ns` stands in where the text has no moment; without it such are left out."""
        return [
            {"ns": at, "name": PREFIX + each.name, "labels": [("device", each.device)], "value": each.value}
            for each in self.readings
            if (at := each.ns if each.ns is not None else ns) is not None
        ]


def read_sensors(text: str, ns: int | None = None) -> Sensors | None:
    """The readings of a text; None where it is of none of these writers. `ns`: when a page was read."""
    lines = [line.rstrip("\r") for line in text.splitlines()]
    if any(line.startswith("DCGM_FI_") for line in lines):
        return _of_dcgm(lines, ns)
    header = next((at for at, line in enumerate(lines) if _is_dmon(line)), None)
    if header is not None:
        return _of_dmon(lines[header:])
    header = next((at for at, line in enumerate(lines) if _is_query(line)), None)
    return None if header is None else _of_query(lines[header:])


def reasons_of(bits: float) -> list[str]:
    """Why the clock is low, by name; the idle device's own reason is none."""
    return [name for name in throttle_reasons(int(bits)) if name != "gpu_idle"]


def read_nvml(nvml: ModuleType | Any, ns: int | None = None) -> Sensors:
    """All NVIDIA devices of this machine; a sensor that does not answer is left out. Needs `nvidia-ml-py`."""
    found = Sensors("NVML")
    nvml.nvmlInit()
    for index in range(nvml.nvmlDeviceGetCount()):
        device, name = nvml.nvmlDeviceGetHandleByIndex(index), f"GPU {index}"
        asked: dict[str, Callable[[Any], float]] = {
            "gpu_utilisation": lambda one: nvml.nvmlDeviceGetUtilizationRates(one).gpu / 100,
            "memory_copy": lambda one: nvml.nvmlDeviceGetUtilizationRates(one).memory / 100,
            "sm_clock": lambda one: nvml.nvmlDeviceGetClockInfo(one, nvml.NVML_CLOCK_SM) * MHZ,
            "sm_clock_limit": lambda one: nvml.nvmlDeviceGetMaxClockInfo(one, nvml.NVML_CLOCK_SM) * MHZ,
            "memory_clock": lambda one: nvml.nvmlDeviceGetClockInfo(one, nvml.NVML_CLOCK_MEM) * MHZ,
            "power": lambda one: nvml.nvmlDeviceGetPowerUsage(one) / 1e3,
            "power_limit": lambda one: nvml.nvmlDeviceGetEnforcedPowerLimit(one) / 1e3,
            "temperature": lambda one: nvml.nvmlDeviceGetTemperature(one, nvml.NVML_TEMPERATURE_GPU),
            "memory_used": lambda one: nvml.nvmlDeviceGetMemoryInfo(one).used,
            "memory_total": lambda one: nvml.nvmlDeviceGetMemoryInfo(one).total,
            "pcie_rx": lambda one: nvml.nvmlDeviceGetPcieThroughput(one, nvml.NVML_PCIE_UTIL_RX_BYTES) * KB,
            "pcie_tx": lambda one: nvml.nvmlDeviceGetPcieThroughput(one, nvml.NVML_PCIE_UTIL_TX_BYTES) * KB,
            "throttle": nvml.nvmlDeviceGetCurrentClocksEventReasons,
        }
        for sensor, ask in asked.items():
            try:
                found.readings.append(Reading(ns, name, sensor, float(ask(device))))
            except nvml.NVMLError:
                found.unread.append(f"{sensor} of {name}: the device does not answer")
    return found


def _of_dcgm(lines: Iterable[str], ns: int | None) -> Sensors:
    found = Sensors("DCGM page")
    unread: set[str] = set()
    for line in lines:
        if not line.startswith("DCGM_FI_"):
            continue
        try:
            samples = [each for family in text_string_to_metric_families(line + "\n") for each in family.samples]
        except ValueError:
            unread.add(f"{line[:40]}: no sample of Prometheus' text")
            continue
        for sample in samples:
            if sample.name not in _BY_DCGM:
                unread.add(f"{sample.name}: its unit is not known here")
            elif not _is_blank(sample.value):
                ours, factor = _BY_DCGM[sample.name]
                at = ns if sample.timestamp is None else int(float(sample.timestamp) * 1e9)
                found.readings.append(Reading(at, _dcgm_device(sample.labels), ours, sample.value * factor))
    found.unread = sorted(unread)
    return found


def _dcgm_device(labels: Mapping[str, str]) -> str:
    """A device, or a part of one; of several machines on a page with its machine."""
    part = f" instance {labels['GPU_I_ID']}" if labels.get("GPU_I_ID") else ""
    host = labels.get("Hostname") or labels.get("instance") or ""
    return f"GPU {labels.get('gpu', labels.get('UUID', '?'))}{part}" + (f" of {host}" if host else "")


def _is_blank(value: float) -> bool:
    return not math.isfinite(value) or (value == int(value) and any(int(value) in each for each in BLANKS))


def _is_dmon(line: str) -> bool:
    words = line.removeprefix("#").split()
    return line.startswith("#") and "gpu" in words and any(word in _BY_DMON for word in words)


def _of_dmon(lines: Sequence[str]) -> Sensors:
    """A header of names and one of units come again after some rows; the columns hold for the rows behind them."""
    found = Sensors("nvidia-smi dmon")
    unread: set[str] = set()
    names: list[str] = []
    units: list[str] = []
    for before, line in pairwise(["", *lines]):
        words = line.removeprefix("#").split()
        if _is_dmon(line):
            names, units = words, []
        elif line.startswith("#") and _is_dmon(before):
            units = words
        elif words and len(words) == len(names) == len(units) and not line.startswith("#"):
            cells = dict(zip(names, words, strict=True))
            day, clock = cells.get("Date"), cells.get("Time")
            moment = _moment(f"{day} {clock}") if day and clock else None
            for name, unit, cell in zip(names, units, words, strict=True):
                if (ours := _BY_DMON.get(name)) is not None:
                    _take(found, unread, moment, f"GPU {cells['gpu']}", ours, name, cell, unit.removeprefix("GPM:"))
    found.unread = sorted(unread)
    return found


def _is_query(line: str) -> bool:
    names = [_column(cell)[0] for cell in line.split(",")]
    return len(names) > 1 and any(name in _BY_QUERY for name in names)


def _column(cell: str) -> tuple[str, str]:
    """`power.draw [W]` → its name and its unit."""
    name, _, unit = cell.strip().partition(" [")
    return name, unit.rstrip("]")


def _of_query(lines: Sequence[str]) -> Sensors:
    found = Sensors("nvidia-smi CSV")
    unread: set[str] = set()
    columns: list[tuple[str, str]] = []
    for cells in csv.reader(lines, skipinitialspace=True):
        if any(_column(cell)[0] in _BY_QUERY for cell in cells):
            columns = [_column(cell) for cell in cells]
            continue
        if len(cells) != len(columns):
            continue
        row = {name: cell.strip() for (name, _), cell in zip(columns, cells, strict=True)}
        moment = _moment(row["timestamp"]) if "timestamp" in row else None
        named = next((row[name] for name in DEVICE_COLUMNS if row.get(name)), "")
        device = f"GPU {named or '0'}"
        if not named:
            unread.add(NO_DEVICE)
        for name, unit in columns:
            if (ours := _BY_QUERY.get(name)) is not None:
                _take(found, unread, moment, device, ours, name, row[name], unit)
        if (bits := _bits(row)) is not None:
            found.readings.append(Reading(moment, device, "throttle", float(bits)))
    found.unread = sorted(unread)
    return found


def _bits(row: Mapping[str, str]) -> int | None:
    """Reasons that have a column each; None where the row has none, or all of them in one number."""
    if any(_BY_QUERY.get(name) == "throttle" for name in row):
        return None
    named = {found[1]: cell for name, cell in row.items() if (found := REASON_COLUMN.fullmatch(name))}
    known = [REASONS[name] * (cell == "Active") for name, cell in named.items()
             if name in REASONS and cell in REASON_CELLS]  # fmt: skip
    return sum(set(known)) if known else None


def _take(
    found: Sensors, unread: set[str], ns: int | None, device: str, ours: str, theirs: str, cell: str, unit: str
) -> None:
    """One cell. Its own unit, where it has one, is that of the column."""
    number, _, behind = cell.partition(" ")
    unit = behind.strip() or unit
    try:
        value = float(int(number, 16)) if number.startswith("0x") else float(number)
    except ValueError:  # the device lacks it: -, [N/A], [Not Supported]
        return
    wanted = NAMES[ours].unit
    if not unit and wanted in UNWRITTEN:
        found.readings.append(Reading(ns, device, ours, value))
    elif WRITTEN.get(unit, ("",))[0] == wanted:
        found.readings.append(Reading(ns, device, ours, value * WRITTEN[unit][1]))
    else:
        unread.add(f"{theirs}: its unit {unit or '(none)'} is not one of {wanted}")


def _moment(text: str) -> int | None:
    """Nanoseconds since 1970: nvidia-smi writes the local time of its machine, which is taken for this one's."""
    for form in _MOMENTS:
        try:
            return int(datetime.strptime(text.strip(), form).timestamp() * 1e9)
        except ValueError:
            continue
    return None
