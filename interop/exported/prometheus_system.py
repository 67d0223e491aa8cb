"""SystemRecords and what the front measures of itself → gauges and counters. Without a sensor there is no series."""

from collections.abc import Mapping, Sequence

from sojourn.interop.exported.prometheus_series import Series
from sojourn.metrics.catalog.compute import DEVICES
from sojourn.metrics.catalog.metric import PROCESSES
from sojourn.metrics.machine.power import joules_between
from sojourn.metrics.machine.sampler import THROTTLE_REASONS
from sojourn.metrics.records import SystemRecord

# Gauges without labels: field of the record, and what one of its units is in the metric's.
GAUGES = {
    "sojourn_compute_sm_clock_hertz": ("gpu_sm_clock_mhz", 1e6),
    "sojourn_compute_memory_clock_hertz": ("gpu_memory_clock_mhz", 1e6),
    "sojourn_compute_temperature_celsius": ("gpu_temperature_celsius", 1),
    "sojourn_compute_utilisation_ratio": ("gpu_utilisation_percent", 0.01),
    "sojourn_memory_device_used_bytes": ("gpu_memory_used_bytes", 1),
    "sojourn_compute_steal_ratio": ("host_steal_percent", 0.01),
}


class SystemFold:
    """Folds one sample of the machine a second."""

    def __init__(self, series: Series):
        self._numbers = series.numbers
        self._lag = series.histograms["sojourn_request_loop_lag_seconds"][()]
        self._last: SystemRecord | None = None

    def observe(self, record: SystemRecord) -> None:
        for name, (field, factor) in GAUGES.items():
            self._set(name, (), getattr(record, field), factor)
        for device in DEVICES:
            self._set("sojourn_compute_power_watts", (device,), getattr(record, f"{device}_power_watts"))
        for process in PROCESSES:
            self._set("sojourn_memory_resident_bytes", (process,), getattr(record, f"{process}_rss_bytes"))
        reasons = record.gpu_throttle_reasons
        for reason in THROTTLE_REASONS.values():
            self._set("sojourn_compute_throttle_active", (reason,), None if reasons is None else reason in reasons)
        if self._last is not None:
            self._grow(self._last, record)
        self._last = record

    def observe_loop_lag(self, counts: Sequence[int], total_ns: int) -> None:
        """Takes over the histogram of the front's event loop: counts between metric.LAG_BOUNDS, and their sum."""
        self._lag.counts, self._lag.total = list(counts), total_ns

    def observe_burst(self, class_ns: Mapping[str, int]) -> None:
        """Adds a profile burst: nanoseconds by kernels.CLASSES."""
        for klass, duration_ns in class_ns.items():
            self._numbers["sojourn_compute_kernel_seconds_total"][(klass,)] += duration_ns

    def _grow(self, earlier: SystemRecord, later: SystemRecord) -> None:
        for device in DEVICES:
            used = joules_between(earlier, later, device)
            if used is not None:
                self._numbers["sojourn_compute_energy_joules_total"][(device,)] += used
        for process in PROCESSES:
            before, now = (getattr(record, f"{process}_cpu_seconds") for record in (earlier, later))
            if now is not None:  # a restarted core begins at 0 again
                spent = now - before if before is not None and now >= before else now
                self._numbers["sojourn_compute_cpu_seconds_total"][(process,)] += round(spent * 1e9)

    def _set(self, name: str, labels: tuple[str, ...], value: float | None, factor: float = 1) -> None:
        if value is None:
            self._numbers[name].pop(labels, None)
        else:
            self._numbers[name][labels] = value * factor
