"""One sample of the machine: psutil, NVML where there is an NVIDIA driver, RAPL where the kernel lets us read it."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil

from sojourn.metrics.machine.host import busy_percent, steal_percent
from sojourn.metrics.machine.neighbours import Neighbours
from sojourn.metrics.machine.process_use import PROC, children_of, cpu_pressure_ns, process_use
from sojourn.metrics.records import SystemRecord

try:
    import pynvml
except ImportError:  # without the engine's extras a machine only generates load or reads runs
    pynvml = None

POWERCAP = Path("/sys/class/powercap")

# Bits of NVML's clock event reasons (nvml.h), in the order of the bits.
THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}


_OF_ALL_RANKS = ("core_cpu_percent", "core_cpu_seconds", "core_rss_bytes", "core_queued_ns")


class SystemSampler:
    """Percentages are means since the sample before; the first is over an instant. `nvml` is the driver's module."""

    def __init__(
        self,
        front_pid: int,
        nvml: ModuleType | Any | None = pynvml,
        powercap: Path = POWERCAP,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        cpu_times: Callable[[], Any] = psutil.cpu_times,
        proc: Path = PROC,
    ):
        self._front = psutil.Process(front_pid)
        self._core: psutil.Process | None = None
        self._ranks: dict[int, psutil.Process] = {}  # of the core's parallel group
        self._gpu = GpuSensors(nvml) if nvml is not None else None
        self._cpu_energy = CpuEnergy(powercap)
        self._clock_ns = clock_ns
        self._cpu_times = cpu_times
        self._last_cpu_times = cpu_times()
        self._proc = proc
        self._last_pressure = (clock_ns(), cpu_pressure_ns(proc))
        self._neighbours = Neighbours(proc)

    def sample(self, core_pid: int | None) -> SystemRecord:
        """`core_pid` may change, when the core is restarted, or be None while there is none."""
        if core_pid is None:
            self._core = None
        elif self._core is None or self._core.pid != core_pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._core = psutil.Process(core_pid)
        now_ns = self._clock_ns()
        earlier, self._last_cpu_times = self._last_cpu_times, self._cpu_times()
        host_percent = busy_percent(earlier, self._last_cpu_times) or 0.0
        front, core = _process("front", self._front, self._proc), self._core_and_ranks()
        neighbours = self._busiest(now_ns, host_percent, front["front_cpu_percent"], core["core_cpu_percent"])
        return SystemRecord(
            ns=now_ns,
            host_cpu_percent=host_percent,
            host_available_bytes=psutil.virtual_memory().available,
            cpu_power_watts=self._cpu_energy.watts(now_ns),
            host_steal_percent=steal_percent(earlier, self._last_cpu_times),
            **front,
            **core,
            cpu_pressure_percent=self._pressure_percent(now_ns),
            neighbours=[name for name, _ in neighbours],
            neighbour_cores=[cores for _, cores in neighbours],
            **(self._gpu.read() if self._gpu is not None else {}),
        )

    def _busiest(
        self, now_ns: int, host_percent: float, front_percent: float | None, core_percent: float | None
    ) -> list[tuple[str, float]]:
        """Other processes with most of the CPUs."""
        cores = host_percent / 100 * (psutil.cpu_count() or 1)
        others = cores - ((front_percent or 0.0) + (core_percent or 0.0)) / 100
        ours = {each.pid for each in (self._front, self._core, *self._ranks.values()) if each is not None}
        return self._neighbours.busiest(now_ns, others, ours)

    def _core_and_ranks(self) -> dict[str, float | None]:
        """The core's own loop; time on CPUs, time without one and memory are also those of the ranks it started."""
        found = _process("core", self._core, self._proc)
        pids = [] if self._core is None else children_of(self._core.pid, self._proc)
        known, self._ranks = self._ranks, {}
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._ranks[pid] = known.get(pid) or psutil.Process(pid)
        for rank in self._ranks.values():
            theirs = _process("core", rank, self._proc)
            for name in _OF_ALL_RANKS:
                if (own := found.get(name)) is not None and (more := theirs.get(name)) is not None:
                    found[name] = own + more
        return found

    def _pressure_percent(self, now_ns: int) -> float | None:
        """Mean since the call before."""
        (before_ns, before), self._last_pressure = self._last_pressure, (now_ns, cpu_pressure_ns(self._proc))
        after = self._last_pressure[1]
        if before is None or after is None or now_ns <= before_ns:
            return None
        return min(100.0, 100 * (after - before) / (now_ns - before_ns))


def _process(name: str, process: psutil.Process | None, proc: Path) -> dict[str, float | None]:
    """The fields of a process: None where it is gone; of its main thread none where the kernel does not count."""
    found: dict[str, float | None] = dict.fromkeys((f"{name}_cpu_percent", f"{name}_cpu_seconds", f"{name}_rss_bytes"))
    if process is None:
        return found
    with contextlib.suppress(psutil.NoSuchProcess), process.oneshot():
        times = process.cpu_times()
        found |= {
            f"{name}_cpu_percent": process.cpu_percent(),
            f"{name}_cpu_seconds": times.user + times.system,
            f"{name}_rss_bytes": process.memory_info().rss,
        }
    if (use := process_use(process.pid, proc)) is not None:
        found |= {
            f"{name}_loop_cpu_ns": use.main.cpu_ns,
            f"{name}_loop_queued_ns": use.main.queued_ns,
            f"{name}_queued_ns": use.queued_ns,
            f"{name}_involuntary_switches": use.involuntary_switches,
        }
    return found


class GpuSensors:
    """The first NVIDIA device that this process may use. Each sensor is read on its own: a virtual GPU may lack
    any of them."""

    def __init__(self, nvml: ModuleType | Any, environment: Mapping[str, str] = os.environ):
        self._nvml = nvml
        self._device = None
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlInit()
            self._device = _first_visible(nvml, environment.get("CUDA_VISIBLE_DEVICES"))

    def read(self) -> dict[str, Any]:
        """Fields of a SystemRecord, those whose sensors answer."""
        if self._device is None:
            return {}
        nvml, device, sensors = self._nvml, self._device, {}
        for name, value in (
            ("gpu_utilisation_percent", lambda: float(nvml.nvmlDeviceGetUtilizationRates(device).gpu)),
            ("gpu_memory_used_bytes", lambda: nvml.nvmlDeviceGetMemoryInfo(device).used),
            ("gpu_power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1000),
            ("gpu_sm_clock_mhz", lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM))),
            ("gpu_memory_clock_mhz", lambda: float(nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM))),
            ("gpu_temperature_celsius",
             lambda: float(nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU))),
            ("gpu_throttle_reasons", lambda: throttle_reasons(nvml.nvmlDeviceGetCurrentClocksEventReasons(device))),
        ):  # fmt: skip
            with contextlib.suppress(nvml.NVMLError):
                sensors[name] = value()
        return sensors


def throttle_reasons(bits: int) -> list[str]:
    """Names of NVML's bits; an unknown bit is given by its number."""
    unknown = bits & ~sum(THROTTLE_REASONS)
    named = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    return [*named, f"bits_{unknown:#x}"] if unknown else named


def _first_visible(nvml: ModuleType | Any, visible: str | None) -> Any:
    """CUDA counts the devices that CUDA_VISIBLE_DEVICES names, NVML all of them. None where it hides them all."""
    if visible is None:
        return nvml.nvmlDeviceGetHandleByIndex(0)
    first = visible.split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(first)
    return nvml.nvmlDeviceGetHandleByIndex(int(first)) if first.isdigit() else None


class CpuEnergy:
    """Power of all CPU packages, by the energy counters that the kernel exposes (RAPL): processor and caches, no
    memory. Most kernels let only root read them, and most virtual machines have none."""

    def __init__(self, powercap: Path = POWERCAP):
        zones = sorted(powercap.glob("intel-rapl:*"))  # the kernel's name for AMD's counters, too
        packages = [zone for zone in zones if zone.name.count(":") == 1]  # without their parts, which they include
        self._packages = [zone for zone in packages if _number(zone / "energy_uj") is not None]
        self._last: tuple[int, list[int]] | None = None

    def watts(self, now_ns: int) -> float | None:
        """Mean since the call before; None at the first call, and where there is no counter."""
        read = [_number(zone / "energy_uj") for zone in self._packages]
        if not read or None in read:
            return None
        last, self._last = self._last, (now_ns, read)
        if last is None or last[0] >= now_ns:
            return None
        microjoules = 0
        for zone, before, after in zip(self._packages, last[1], read, strict=True):
            wraps = 0 if after >= before else (_number(zone / "max_energy_range_uj") or 0)
            microjoules += after - before + wraps
        return microjoules * 1000 / (now_ns - last[0])


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None
