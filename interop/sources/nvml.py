"""What NVML shows of all NVIDIA devices of this machine. It needs `nvidia-ml-py` and a driver.

From Hopper on the driver counts what works within a device (GPM): activity of its SMs and tensor cores, use of its
memory's bandwidth, PCIe, NVLink. Each is a mean since the reading before. On older devices they are left out: a DCGM
exporter has them.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType
from typing import Any

from sojourn.interop.sources.sensor_names import KB, MHZ, MIB
from sojourn.interop.sources.sensors import Reading, Sensors

NVML = "NVML"
# The number of a GPM metric in nvml.h → ours, and its factor.
GPM = {
    1: ("engine_activity", 0.01), 2: ("sm_activity", 0.01), 3: ("sm_occupancy", 0.01), 5: ("tensor_activity", 0.01),
    10: ("memory_bandwidth", 0.01), 20: ("pcie_tx", MIB), 21: ("pcie_rx", MIB), 60: ("nvlink_rx", MIB),
    61: ("nvlink_tx", MIB),
}  # fmt: skip


class Nvml:
    """Owns the driver's samples and its queue of errors. `nvml` is the driver's module."""

    def __init__(self, nvml: ModuleType | Any):
        """Raises the module's NVMLError without a driver."""
        self._nvml = nvml
        nvml.nvmlInit()
        self._devices = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        self._samples = {index: found for index in range(len(self._devices)) if (found := self._first_sample(index))}
        self._errors: Any = None
        with suppress(nvml.NVMLError):
            self._errors = nvml.nvmlEventSetCreate()
        for device in self._devices if self._errors is not None else ():
            with suppress(nvml.NVMLError):  # a virtual GPU reports none
                nvml.nvmlDeviceRegisterEvents(device, nvml.nvmlEventTypeXidCriticalError, self._errors)

    def read(self, ns: int | None = None) -> Sensors:
        """A sensor that does not answer is left out, and named in `unread`."""
        found, nvml = Sensors(NVML), self._nvml
        for index, device in enumerate(self._devices):
            name = f"GPU {index}"
            found.readings.append(Reading(ns, name, "xid", 0.0))
            for sensor, ask in self._asked(device).items():
                try:
                    found.readings.append(Reading(ns, name, sensor, float(ask())))
                except nvml.NVMLError:
                    found.unread.append(f"{sensor} of {name}: the device does not answer")
            found.readings += [Reading(ns, name, sensor, value) for sensor, value in self._counted_inside(index)]
        found.readings += [Reading(ns, f"GPU {index}", "xid", float(number)) for index, number in self._new_errors()]
        return found

    def _asked(self, device: Any) -> dict[str, Callable[[], float]]:
        nvml = self._nvml
        return {
            "gpu_utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100,
            "memory_copy": lambda: nvml.nvmlDeviceGetUtilizationRates(device).memory / 100,
            "sm_clock": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_SM) * MHZ,
            "sm_clock_limit": lambda: nvml.nvmlDeviceGetMaxClockInfo(device, nvml.NVML_CLOCK_SM) * MHZ,
            "memory_clock": lambda: nvml.nvmlDeviceGetClockInfo(device, nvml.NVML_CLOCK_MEM) * MHZ,
            "power": lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3,
            "power_limit": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(device) / 1e3,
            "power_limit_default": lambda: nvml.nvmlDeviceGetPowerManagementDefaultLimit(device) / 1e3,
            "temperature": lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
            "memory_used": lambda: nvml.nvmlDeviceGetMemoryInfo(device).used,
            "memory_total": lambda: nvml.nvmlDeviceGetMemoryInfo(device).total,
            "pcie_rx": lambda: nvml.nvmlDeviceGetPcieThroughput(device, nvml.NVML_PCIE_UTIL_RX_BYTES) * KB,
            "pcie_tx": lambda: nvml.nvmlDeviceGetPcieThroughput(device, nvml.NVML_PCIE_UTIL_TX_BYTES) * KB,
            "pcie_generation": lambda: nvml.nvmlDeviceGetCurrPcieLinkGeneration(device),
            "pcie_lanes": lambda: nvml.nvmlDeviceGetCurrPcieLinkWidth(device),
            "pcie_replays": lambda: nvml.nvmlDeviceGetPcieReplayCounter(device),
            "ecc_uncorrected": lambda: nvml.nvmlDeviceGetTotalEccErrors(
                device, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            ),
            "throttle": lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(device),
        }

    def _first_sample(self, index: int) -> list[Any]:
        """A sample to compare with and one to fill; [] of a device without GPM."""
        nvml, device = self._nvml, self._devices[index]
        try:
            if not nvml.nvmlGpmQueryDeviceSupport(device).isSupportedDevice:
                return []
            pair = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
            nvml.nvmlGpmSampleGet(device, pair[0])
            return pair
        except nvml.NVMLError:
            return []

    def _counted_inside(self, index: int) -> Iterator[tuple[str, float]]:
        nvml, pair = self._nvml, self._samples.get(index)
        if pair is None:
            return
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = nvml.NVML_GPM_METRICS_GET_VERSION, len(GPM)
        for place, number in enumerate(GPM):
            asked.metrics[place].metricId = number
        try:
            nvml.nvmlGpmSampleGet(self._devices[index], pair[1])
            asked.sample1, asked.sample2 = pair
            nvml.nvmlGpmMetricsGet(asked)
        except nvml.NVMLError:
            return
        pair.reverse()
        for place, (sensor, factor) in enumerate(GPM.values()):
            if asked.metrics[place].nvmlReturn == 0:
                yield sensor, asked.metrics[place].value * factor

    def _new_errors(self) -> Iterator[tuple[int, int]]:
        """Index of a device and its Xid, of each error since the reading before."""
        nvml = self._nvml
        while self._errors is not None:
            try:
                event = nvml.nvmlEventSetWait(self._errors, 0)
                yield nvml.nvmlDeviceGetIndex(event.device), event.eventData
            except nvml.NVMLError:  # there is none: a timeout
                return
