"""One sample of the machine: psutil, and NVML where there is an NVIDIA driver."""

import contextlib
import time

import psutil

from metrics.records import SystemRecord

try:
    import pynvml
except ImportError:  # without the engine's extras a machine only generates load or reads runs
    pynvml = None


class SystemSampler:
    """Percentages are means since the sample before; the first one is over an instant."""

    def __init__(self, front_pid: int):
        self._front = psutil.Process(front_pid)
        self._core: psutil.Process | None = None
        self._gpu = None
        if pynvml is not None:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlInit()
                self._gpu = pynvml.nvmlDeviceGetHandleByIndex(0)

    def sample(self, core_pid: int | None) -> SystemRecord:
        """`core_pid` may change, when the core is restarted, or be None while there is none."""
        if core_pid is None:
            self._core = None
        elif self._core is None or self._core.pid != core_pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                self._core = psutil.Process(core_pid)
        core_cpu = core_rss = None
        if self._core is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                core_cpu, core_rss = self._core.cpu_percent(), self._core.memory_info().rss
        return SystemRecord(
            ns=time.monotonic_ns(),
            host_cpu_percent=psutil.cpu_percent(),
            front_cpu_percent=self._front.cpu_percent(),
            core_cpu_percent=core_cpu,
            core_rss_bytes=core_rss,
            host_available_bytes=psutil.virtual_memory().available,
            **self._gpu_sensors(),
        )

    def _gpu_sensors(self) -> dict[str, float]:
        if self._gpu is None:
            return {}
        sensors: dict[str, float] = {}
        with contextlib.suppress(pynvml.NVMLError):  # a virtual GPU may lack any of them
            sensors["gpu_utilisation_percent"] = float(pynvml.nvmlDeviceGetUtilizationRates(self._gpu).gpu)
            sensors["gpu_memory_used_bytes"] = pynvml.nvmlDeviceGetMemoryInfo(self._gpu).used
            sensors["gpu_power_watts"] = pynvml.nvmlDeviceGetPowerUsage(self._gpu) / 1000
            sensors["gpu_sm_clock_mhz"] = float(pynvml.nvmlDeviceGetClockInfo(self._gpu, pynvml.NVML_CLOCK_SM))
        return sensors
