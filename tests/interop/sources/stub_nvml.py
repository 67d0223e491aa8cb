"""The shape of `pynvml` over scripted devices: what a test says a device shows, and errors for all else."""

from types import SimpleNamespace

ASKED = {
    "nvmlDeviceGetPowerUsage": "power", "nvmlDeviceGetEnforcedPowerLimit": "power_limit",
    "nvmlDeviceGetPowerManagementDefaultLimit": "power_limit_default", "nvmlDeviceGetClockInfo": "clock",
    "nvmlDeviceGetMaxClockInfo": "clock_limit", "nvmlDeviceGetTemperature": "temperature",
    "nvmlDeviceGetPcieThroughput": "pcie", "nvmlDeviceGetCurrPcieLinkGeneration": "generation",
    "nvmlDeviceGetCurrPcieLinkWidth": "lanes", "nvmlDeviceGetTotalEccErrors": "ecc",
    "nvmlDeviceGetCurrentClocksEventReasons": "reasons", "nvmlDeviceGetPcieReplayCounter": "replays",
}  # fmt: skip


class StubNvml:
    """`devices`: one dictionary a device, in NVML's units; `gpm`: number of a metric → its value."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, NVML_PCIE_UTIL_RX_BYTES, NVML_PCIE_UTIL_TX_BYTES = range(5)
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC, nvmlEventTypeXidCriticalError = 1, 0, 8
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, *devices, has_driver=True):
        self.devices, self.has_driver, self.events = list(devices), has_driver, []

    def nvmlInit(self):
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetCount(self):
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.devices[index]

    def nvmlDeviceGetIndex(self, device):
        return next(place for place, each in enumerate(self.devices) if each is device)

    def nvmlDeviceGetUtilizationRates(self, device):
        return SimpleNamespace(gpu=self._of(device, "gpu"), memory=self._of(device, "memory"))

    def nvmlDeviceGetMemoryInfo(self, device):
        return SimpleNamespace(used=self._of(device, "used"), total=self._of(device, "total"))

    def nvmlEventSetCreate(self):
        return []

    def nvmlDeviceRegisterEvents(self, device, kinds, events):
        assert kinds == self.nvmlEventTypeXidCriticalError

    def nvmlEventSetWait(self, events, timeout_ms):
        if not self.events:
            raise self.NVMLError("Timeout")
        index, number = self.events.pop(0)
        return SimpleNamespace(device=self.devices[index], eventData=number)

    def nvmlGpmQueryDeviceSupport(self, device):
        return SimpleNamespace(isSupportedDevice="gpm" in device)

    def nvmlGpmSampleAlloc(self):
        return {}

    def nvmlGpmSampleGet(self, device, sample):
        sample["gpm"] = dict(device["gpm"])

    def c_nvmlGpmMetricsGet_t(self):
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=1, value=0.0) for _ in range(16)])

    def nvmlGpmMetricsGet(self, asked):
        for metric in asked.metrics[: asked.numMetrics]:
            if metric.metricId in asked.sample2["gpm"]:
                metric.nvmlReturn, metric.value = 0, asked.sample2["gpm"][metric.metricId]

    def __getattr__(self, name):
        if name not in ASKED:
            raise AttributeError(name)
        return lambda device, *_: self._of(device, ASKED[name])

    def _of(self, device, name):
        if name not in device:
            raise self.NVMLError("Not Supported")
        return device[name]
